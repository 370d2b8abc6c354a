"""From a recipe to its policy. Imports a backend's library only when that backend is asked for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from omnifleet.config.recipe import Recipe
from omnifleet.types import LogprobsMode
from omnifleet_trainer.policy.port import Policy


def open_policy(recipe: Recipe, source: Path, *, run_dir: Path | None = None) -> Policy:
    """The policy that `recipe.trainer.backend` names, over the checkpoint folder `source`. Close it when done.

    The trainer divides its logits by sampling.temperature where the rollout's logprobs are processed, and by 1 where
    they are raw: both sides then speak of one distribution. run_dir: plots of mismatches go into it, None = no plots.
    Raises OmnifleetError (see `AutoModelPolicy`, `MegatronPolicy`).
    """
    match recipe.trainer.backend:
        case "fake":
            from omnifleet_trainer.policy.fake import FakePolicy

            return FakePolicy(Path(recipe.model.path))
        case "automodel":
            from omnifleet_trainer.policy.automodel import AutoModelPolicy

            return AutoModelPolicy(source, **_settings(recipe, run_dir))
        case "megatron":
            from omnifleet_trainer.policy.megatron import MegatronPolicy

            return MegatronPolicy(source, **_settings(recipe, run_dir))


def _settings(recipe: Recipe, run_dir: Path | None) -> dict[str, Any]:
    """What the backends that compute take alike."""
    from omnifleet_trainer.policy.mismatch import MismatchPlots

    processed = recipe.rollout.logprobs_mode is LogprobsMode.PROCESSED
    return {
        "trainer": recipe.trainer,
        "objective": recipe.objective,
        "temperature": recipe.sampling.temperature if processed else 1.0,
        "freeze": recipe.model.freeze,
        "seed": recipe.run.seed,
        "on_mismatch": None if run_dir is None else MismatchPlots(run_dir / "mismatch"),
    }
