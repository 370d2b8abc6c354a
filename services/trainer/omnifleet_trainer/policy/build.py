"""From a recipe to its policy. Imports a backend's library only when that backend is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from omnifleet.auth import Scope
from omnifleet.config.recipe import Recipe
from omnifleet_trainer.policy.port import Policy

if TYPE_CHECKING:
    from omnifleet_trainer.policy.nodes import Meeting


def open_policy(recipe: Recipe, source: Path, *, run_dir: Path | None = None) -> Policy:
    """The policy that `recipe.trainer.backend` names, over the checkpoint folder `source`. Close it when done.

    More ranks than one (`trainer.parallel`) run in processes that are started here and end with this one.
    run_dir: plots of mismatches go into it, None = no plots. Raises OmnifleetError (see `RankPolicy`, `WorldPolicy`).
    """
    if recipe.trainer.backend == "fake":
        from omnifleet_trainer.policy.fake import FakePolicy

        return FakePolicy(Path(recipe.model.path))
    from omnifleet_trainer.policy.group import ALONE
    from omnifleet_trainer.policy.job import Job, open_rank
    from omnifleet_trainer.policy.mismatch import MismatchPlots
    from omnifleet_trainer.policy.world import WorldPolicy

    job = Job.of(recipe, source)
    plots = None if run_dir is None else MismatchPlots(run_dir / "mismatch")
    if recipe.trainer.parallel.world == 1:
        return open_rank(job, ALONE, on_mismatch=plots)
    return WorldPolicy(job, on_mismatch=plots, meeting=_meeting(recipe, run_dir))


def _meeting(recipe: Recipe, run_dir: Path | None) -> Meeting | None:
    from omnifleet.service import load_tokens
    from omnifleet_trainer.policy.nodes import Meeting

    if run_dir is None:
        return None
    secret = load_tokens(run_dir, recipe.auth.tokens_file).secret(Scope.SERVICE)
    return Meeting(run_dir, secret, recipe.trainer.parallel.host)
