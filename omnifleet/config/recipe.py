"""A recipe: everything about one training run, in one file. Its sections are in the files beside this one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import Field, ValidationInfo, model_validator

from omnifleet.config.base import PLAN, StrictModel, is_plan
from omnifleet.config.cluster import ClusterConfig, Split, filled, problems, unsaid
from omnifleet.config.data import DataConfig, ScorerConfig, SplitConfig
from omnifleet.config.evaluation import EvaluationConfig
from omnifleet.config.fit import CHECKS, check_backend
from omnifleet.config.metrics import MetricsConfig
from omnifleet.config.model import UNTAUGHT, ModelConfig, SamplingConfig
from omnifleet.config.objective import ObjectiveConfig
from omnifleet.config.parallel import ParallelConfig
from omnifleet.config.refit import CanaryConfig, RefitConfig
from omnifleet.config.services import (
    EnvironmentsConfig,
    GatewayConfig,
    MediaConfig,
    RewardConfig,
    RolloutConfig,
)
from omnifleet.config.trainer import LoraConfig, OptimizerConfig, TrainerConfig

__all__ = [
    "PLAN", "UNTAUGHT", "AuthConfig", "CanaryConfig", "DataConfig", "EvaluationConfig", "LoraConfig", "ModelConfig",
    "ObjectiveConfig", "OptimizerConfig", "ParallelConfig", "Recipe", "RefitConfig", "RunConfig", "SamplingConfig",
    "ScorerConfig", "SplitConfig", "TrainerConfig", "is_plan",
]  # fmt: skip


class RunConfig(StrictModel):
    """Who the run is and where its files are."""

    name: str = Field(pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$")
    """Name of the run; its folder is `root/name`."""
    root: Path = Path("runs")
    """Folder of all runs."""
    seed: int = Field(0, ge=0)
    """Seed of data order, sampling and initialisation."""


class AuthConfig(StrictModel):
    """Who may call."""

    tokens_file: Path | None = None
    """File of scope -> secret; default: generated in the run's folder."""


class Recipe(StrictModel):
    """One training run. Unknown keys are errors; `omnifleet config check` says what is wrong before anything starts."""

    run: RunConfig
    model: ModelConfig
    cluster: ClusterConfig | None = None
    data: DataConfig = DataConfig()
    reward: tuple[ScorerConfig, ...] = Field(min_length=1)
    """Scorers whose weighted sum is the reward."""
    sampling: SamplingConfig = SamplingConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    metrics: MetricsConfig = MetricsConfig()
    trainer: TrainerConfig = TrainerConfig()
    refit: RefitConfig = RefitConfig()
    rollout: RolloutConfig = RolloutConfig()
    gateway: GatewayConfig = GatewayConfig()
    media: MediaConfig = MediaConfig()
    reward_service: RewardConfig = RewardConfig()
    environments: EnvironmentsConfig = EnvironmentsConfig()
    auth: AuthConfig = AuthConfig()

    @property
    def run_dir(self) -> Path:
        """The run's folder."""
        return self.run.root / self.run.name

    @property
    def longest_prompt(self) -> int:
        """Tokens that an expanded prompt may have: `data.max_prompt_tokens`, and what the context leaves before a reply."""
        room = self.rollout.engine.max_model_len - self.data.min_generation_tokens
        return min(self.data.max_prompt_tokens, room)

    @property
    def colocated(self) -> bool:
        """True if trainer and engines take turns on the same devices."""
        return self.rollout.sleep_level is not None

    @model_validator(mode="before")
    @classmethod
    def _follows_from_the_cluster(cls, body: Any) -> Any:
        return filled(body) if isinstance(body, dict) else body

    @model_validator(mode="after")
    def _parts_fit(self, info: ValidationInfo) -> Recipe:
        if not is_plan(info):
            check_backend(self)
        for check in CHECKS:
            check(self)
        return self

    @model_validator(mode="after")
    def _fits_the_cluster(self, info: ValidationInfo) -> Recipe:
        if self.cluster is None:
            return self
        dp, engines = self.trainer.parallel.dp, self.rollout.workers
        found = list(problems(self.cluster, self._split(), dp=dp, engines=engines, turns=self.colocated))
        found += [] if is_plan(info) else unsaid(self.cluster, self.trainer.parallel.nodes)
        if found:
            raise ValueError("; ".join(found))
        return self

    def _split(self) -> Split:
        trainer, sizes = self.trainer, self.trainer.parallel
        return Split(
            ranks=sizes.tp * sizes.pp * sizes.cp,
            tp=sizes.tp,
            experts=sizes.ep,
            engine=self.rollout.engine.tensor_parallel_size,
            samples=trainer.batch_samples or trainer.prompts_per_step * trainer.generations_per_prompt,
        )
