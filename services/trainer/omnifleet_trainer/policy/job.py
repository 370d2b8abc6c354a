"""What every rank of a policy is told to build; travels to other processes as JSON."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omnifleet.config.recipe import ObjectiveConfig, Recipe, TrainerConfig
from omnifleet.types import LogprobsMode
from omnifleet_trainer.policy.mismatch import OnMismatch

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

    from omnifleet_trainer.policy.group import Place
    from omnifleet_trainer.policy.rank import RankPolicy


@dataclass(frozen=True, slots=True)
class Job:
    """source: checkpoint folder. temperature: the one that generation logprobs were taken at (1 for raw ones).
    freeze: glob patterns over the checkpoint's names. seed: of the run."""

    source: Path
    trainer: TrainerConfig
    objective: ObjectiveConfig
    temperature: float = 1.0
    freeze: tuple[str, ...] = ()
    seed: int = 0

    @classmethod
    def of(cls, recipe: Recipe, source: Path) -> Job:
        """From a recipe. The trainer divides its logits by sampling.temperature where the rollout's logprobs are
        processed, and by 1 where they are raw: both sides then speak of one distribution."""
        processed = recipe.rollout.logprobs_mode is LogprobsMode.PROCESSED
        return cls(
            source,
            recipe.trainer,
            recipe.objective,
            temperature=recipe.sampling.temperature if processed else 1.0,
            freeze=recipe.model.freeze,
            seed=recipe.run.seed,
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "source": str(self.source),
            "trainer": self.trainer.model_dump(mode="json"),
            "objective": self.objective.model_dump(mode="json"),
            "temperature": self.temperature,
            "freeze": self.freeze,
            "seed": self.seed,
        }

    @classmethod
    def of_json(cls, body: dict[str, Any]) -> Job:
        """Undo `to_json`."""
        return cls(
            Path(body["source"]),
            TrainerConfig.model_validate(body["trainer"]),
            ObjectiveConfig.model_validate(body["objective"]),
            temperature=body["temperature"],
            freeze=tuple(body["freeze"]),
            seed=body["seed"],
        )


def open_rank(
    job: Job, place: Place, store: Store | None = None, on_mismatch: OnMismatch | None = None
) -> RankPolicy:
    """This process's rank of the policy; collective if the world has others. Raises OmnifleetError, see `RankPolicy`."""
    if job.trainer.backend == "megatron":
        from omnifleet_trainer.policy.megatron import MegatronPolicy

        return MegatronPolicy(job, place, store, on_mismatch)
    from omnifleet_trainer.policy.automodel import AutoModelPolicy

    return AutoModelPolicy(job, place, store, on_mismatch)
