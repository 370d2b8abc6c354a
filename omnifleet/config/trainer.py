"""The trainer of a recipe: loop, policy, optimiser, ledger."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, model_validator

from omnifleet.config.base import StrictModel, is_plan
from omnifleet.config.parallel import ParallelConfig


class OptimizerConfig(StrictModel):
    """AdamW with linear warm-up, then constant."""

    lr: float = Field(1e-6, ge=0)
    """Peak learning rate; 0 = control run, weights never move."""
    betas: tuple[float, float] = (0.9, 0.999)
    """AdamW betas."""
    eps: float = Field(1e-8, gt=0)
    """AdamW epsilon."""
    weight_decay: float = Field(0.0, ge=0)
    """Decoupled weight decay."""
    warmup_steps: int = Field(0, ge=0)
    """Steps from warmup_start to the peak."""
    warmup_start: float = Field(0.1, gt=0, le=1)
    """First learning rate, as a share of the peak."""
    grad_clip: float = Field(1.0, gt=0)
    """Largest global gradient norm."""


class LoraConfig(StrictModel):
    """Adapters beside fixed weights: W + alpha / rank x B A. automodel only."""

    targets: tuple[str, ...] = Field(("*.q_proj", "*.k_proj", "*.v_proj", "*.o_proj"), min_length=1)
    """Glob patterns over the names of linear layers; a pattern that matches nothing is an error."""
    rank: int = Field(16, ge=1)
    """Width of an adapter."""
    alpha: int = Field(32, ge=1)
    """Scale, times 1 / rank."""


class TrainerConfig(StrictModel):
    """The loop, the policy and the ledger."""

    listen: str = "127.0.0.1:0"
    """gRPC address."""
    http_listen: str = "127.0.0.1:0"
    """HTTP address: health and metrics."""
    backend: Literal["automodel", "megatron", "fake"] = "automodel"
    """Library that updates the policy; `fake` computes nothing, for tests of everything around it."""
    parallel: ParallelConfig = ParallelConfig()
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute dtype; master weights and optimiser are float32."""
    threads: int | None = Field(None, ge=1)
    """CPU threads of each rank of the policy; default: all of one, shares of several."""
    steps: int = Field(100, ge=1)
    """Training steps of the run."""
    prompts_per_step: int = Field(32, ge=1)
    """Groups that one step trains on."""
    generations_per_prompt: int = Field(16, ge=1)
    """Samples of one group (G)."""
    batch_samples: int | None = Field(None, ge=1)
    """Samples of one optimiser update; default: all of the step. Must divide them."""
    micro_batch_tokens: int = Field(16384, gt=0)
    """Padded tokens of one forward pass; must hold the longest sequence."""
    packing: bool | None = None
    """Sequences of a micro-batch one after the other, so that none is padded. Default: on with megatron; automodel pads
    sequences of like length and has no other way."""
    recompute: bool = False
    """Keep each layer's input alone, and compute the layer again in the backward pass: less memory, more time."""
    lora: LoraConfig | None = None
    """Set ({} suffices): adapters train, and no other weight. Engines get the sums."""
    logprob_chunk: int | None = Field(None, gt=0)
    """Positions whose logits exist at once; each is computed again in the backward pass. Default: all, once."""
    max_staleness: int = Field(1, ge=0)
    """Steps that a sample's oldest token may lag behind the weights it trains; 0 = synchronous."""
    buffer_groups: int | None = Field(None, ge=1)
    """Groups that may be running or ready at once; default: (max_staleness + 1) x prompts_per_step."""
    groups_at_once: int | None = Field(None, ge=1)
    """Groups that are generated at once; default: as many as the staleness budget admits. Fewer spread generation over
    the step: engines that are quicker than the trainer then stay busy beside it, and samples are fresher."""
    sampler: Literal["fifo", "freshest", "in_order"] = "fifo"
    """Which ready groups a step takes."""
    attempts_per_prompt: int = Field(5, ge=1)
    """Tries of a prompt that fails for reasons of its own before it is given up, with a typed outcome."""
    rollout_timeout_s: float = Field(300.0, gt=0)
    """Longest life of one group's rollout."""
    step_timeout_s: float = Field(1800.0, gt=0)
    """Longest wait for the groups of one step."""
    refit_every: int = Field(1, ge=1)
    """Steps between refits."""
    refit_timeout_s: float = Field(60.0, gt=0)
    """Deadline of each phase of a refit, for each worker."""
    turn_timeout_s: float = Field(300.0, gt=0)
    """With rollout.sleep_level: longest time in which the devices change hands, engines and policy each."""
    peak_tflops: float | None = Field(None, gt=0)
    """Dense peak of the policy's devices in its dtype, 10^12 operations a second (one H200, bfloat16: 989); absent = no
    `mfu` metric."""
    checkpoint_every: int = Field(10, ge=1)
    """Steps between checkpoints."""
    checkpoints_kept: int = Field(2, ge=1)
    """Newest checkpoints that stay on disk."""
    checkpoints_best: int = Field(0, ge=0)
    """Best checkpoints by `checkpoint_metric` that stay beside the newest."""
    checkpoint_metric: str = "heldout_reward"
    """Metric of a step's record that ranks checkpoints; one without it ranks last."""
    checkpoint_metric_higher: bool = True
    """Whether more of it is better."""
    checkpoint_in_background: bool = True
    """Copy to host memory, then write beside the next step; off: the loop waits, without the copy."""
    save_by_s: float | None = Field(None, gt=0)
    """Seconds after which the process must have saved: it ends with a checkpoint before a step that might not fit, and
    the same command resumes. For job time limits."""
    ledger_payload_steps: int | None = Field(None, ge=1)
    """Steps whose tokens and texts the ledger keeps; older ones keep their rows (reward, versions, digests) only.
    Default: all. What a kept checkpoint may need stays."""
    optimizer: OptimizerConfig = OptimizerConfig()

    @model_validator(mode="after")
    def _batch_divides(self) -> TrainerConfig:
        samples = self.prompts_per_step * self.generations_per_prompt
        if self.batch_samples is not None and samples % self.batch_samples:
            raise ValueError(
                f"batch_samples {self.batch_samples} does not divide prompts_per_step x generations_per_prompt = {samples}"
            )
        return self

    @model_validator(mode="after")
    def _backend_has_the_ranks(self, info: ValidationInfo) -> TrainerConfig:
        if is_plan(info):
            return self
        if (refused := self.parallel.refused(self.backend)) is not None:
            raise ValueError(f"parallel.{refused[0]}: {refused[1]}")
        if self.lora is not None and self.backend != "automodel":
            raise ValueError(f"trainer.lora needs backend = automodel: {self.backend} has no adapters")
        if self.packing is False and self.parallel.cp > 1:
            raise ValueError("parallel.cp divides packed sequences: leave trainer.packing out")
        if self.backend == "automodel" and self.parallel.tp > 1:
            for name in ("lora", "logprob_chunk"):
                if getattr(self, name) is not None:
                    raise ValueError(
                        f"trainer.{name} needs whole layers: leave it out, or set parallel.tp = 1"
                    )
        if self.packing and self.backend != "megatron":
            raise ValueError(f"trainer.packing needs backend = megatron: {self.backend} pads")
        return self

    @model_validator(mode="after")
    def _loop_can_turn(self) -> TrainerConfig:
        if self.buffer_groups is not None and self.buffer_groups < self.prompts_per_step:
            raise ValueError(
                f"buffer_groups {self.buffer_groups} < prompts_per_step {self.prompts_per_step}: a step could never fill"
            )
        if self.refit_every > self.max_staleness + 1:
            raise ValueError(
                f"refit_every {self.refit_every} > max_staleness {self.max_staleness} + 1: samples would be too old to "
                "train before newer weights serve; raise max_staleness or lower refit_every"
            )
        return self
