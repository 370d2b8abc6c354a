"""The objective of a run: rewards to advantages, logprobs to a loss. Formulas and sources: docs/numerics.md."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

from pydantic import Field, model_validator

from omnifleet.config.base import StrictModel

RejectionRule = Literal["sequence", "geometric", "k2", "k3", "veto"]
_SAMPLER_SURROGATES = ("aipo", "topr", "dppo_tv")
"""Their ratios are to the policy that sampled."""


class RejectionConfig(StrictModel):
    """One rule that keeps a sample out of the loss, by w_t = exp(prev - generation) of its trained tokens."""

    rule: RejectionRule
    """sequence (MIS): product of w_t in [min, max]. geometric: its root. veto: every w_t. k2, k3: mean estimate <= max."""
    min: float = Field(0.0, ge=0)
    """Lower bound; k2 and k3 have none."""
    max: float = Field(gt=0)
    """Upper bound."""

    @model_validator(mode="after")
    def _bounds(self) -> RejectionConfig:
        if self.min > self.max:
            raise ValueError(f"min {self.min} > max {self.max}: every sample would be rejected")
        if self.rule in ("k2", "k3") and self.min:
            raise ValueError(f"rule = {self.rule} has no lower bound: leave out min (it is {self.min})")
        return self


class RewardScaling(StrictModel):
    """Clamp a reward to the source range, then map it linearly to the target range (NeMo RL)."""

    source_min: float = 0.0
    """Reward that becomes target_min, and everything below it."""
    source_max: float = 1.0
    """Reward that becomes target_max, and everything above it."""
    target_min: float = 0.0
    """Smallest scaled reward."""
    target_max: float = 1.0
    """Largest scaled reward."""

    @model_validator(mode="after")
    def _ranges(self) -> RewardScaling:
        for name, low, high in (
            ("source", self.source_min, self.source_max),
            ("target", self.target_min, self.target_max),
        ):
            if low >= high:
                raise ValueError(f"{name}_min {low} must be below {name}_max {high}")
        return self


class OverlongShaping(StrictModel):
    """DAPO's soft punishment: nothing up to max_tokens - buffer_tokens, then linearly down to -penalty at max_tokens."""

    max_tokens: int = Field(gt=0)
    """Length at which the whole penalty is due; at most sampling.max_tokens."""
    buffer_tokens: int = Field(512, gt=0)
    """Tokens over which the penalty grows."""
    penalty: float = Field(1.0, gt=0)
    """Largest penalty."""

    @model_validator(mode="after")
    def _fits(self) -> OverlongShaping:
        if self.buffer_tokens > self.max_tokens:
            raise ValueError(f"buffer_tokens {self.buffer_tokens} > max_tokens {self.max_tokens}")
        return self


class RewardShaping(StrictModel):
    """What a reply's length does to its reward, after scaling."""

    overlong: OverlongShaping | None = None
    """Soft penalty for long replies; absent = none."""
    truncated_factor: float | None = Field(None, ge=0, le=1)
    """Factor on the reward of a reply that the length limit cut; absent = none."""


class MessagePenalties(StrictModel):
    """Advantages that replace those of a faulty message's tokens; absent = the fault costs nothing."""

    invalid_tool_call: float | None = Field(None, le=0)
    """A tool call that is not a JSON object with a name; wins over the other."""
    malformed_thinking: float | None = Field(None, le=0)
    """Think tags that do not pair, in order, once."""


class SapoConfig(StrictModel):
    """Temperatures of the soft gate."""

    tau_positive: float = Field(1.0, gt=0)
    """For advantages above 0."""
    tau_negative: float = Field(1.05, gt=0)
    """For the others; larger = they fade faster."""


class AipoConfig(StrictModel):
    """Bound of the one-sided weight."""

    cap: float = Field(2.0, gt=0)
    """Largest weight current / generation."""


class DppoConfig(StrictModel):
    """Bounds of the total-variation mask."""

    delta_low: float = Field(0.2, gt=0, le=1)
    """A token with A <= 0 is dropped if its probability fell by more than this."""
    delta_high: float = Field(0.2, gt=0, le=1)
    """A token with A > 0 is dropped if its probability rose by more than this."""
    cap: float = Field(20.0, gt=0)
    """Largest weight of a kept token."""


class ObjectiveConfig(StrictModel):
    """Defaults: GRPO as in NeMo RL's ClippedPGLoss and its `grpo` advantage estimator."""

    # rewards to advantages
    reward_scaling: RewardScaling | None = None
    """Range mapping of rewards, before everything else."""
    reward_shaping: RewardShaping = RewardShaping()
    """Length penalties."""
    baseline: Literal["leave_one_out", "group_mean", "none"] = "leave_one_out"
    """What is subtracted from a reward."""
    std: Literal["leave_one_out", "sample", "population", "none"] = "leave_one_out"
    """What centred rewards are divided by."""
    whitening: bool = False
    """Then make the advantages of all trained tokens of the step mean 0, deviation 1 (REINFORCE++)."""
    masked_in_baseline: bool = False
    """Let samples that do not train enter the baselines of their group, as NeMo RL does."""
    advantage_clip: float | None = Field(None, gt=0)
    """Clamp of advantages to [-clip, clip]."""
    penalties: MessagePenalties = MessagePenalties()
    """Advantages of faulty messages."""
    dynamic_sampling: bool = False
    """Drop groups whose rewards are all equal and generate others in their place (DAPO)."""
    dynamic_sampling_limit: int = Field(10, ge=1)
    """Steps' worth of groups that may be dropped in a row before the run ends."""

    # the surrogate
    surrogate: Literal["clipped", "cispo", "aipo", "sapo", "topr", "dppo_tv", "reinforce"] = "clipped"
    """Form of the policy gradient; one file each in `omnifleet_trainer.objectives.surrogates`."""
    old_policy: Literal["prev", "generation"] = "prev"
    """What ratios are taken to: the trainer's weights before the step, or the engine's that sampled."""
    ratio: Literal["token", "sequence", "sequence_token"] = "token"
    """Ratio per token, per sequence (GSPO), or of the sequence with each token's own gradient (GSPO-token)."""
    clip_low: float = Field(0.2, ge=0)
    """Lower clip of the ratio: 1 - clip_low."""
    clip_high: float = Field(0.2, ge=0)
    """Upper clip of the ratio: 1 + clip_high."""
    dual_clip: float | None = Field(None, gt=1)
    """Bound of the loss for negative advantages."""
    sapo: SapoConfig = SapoConfig()
    """Settings of surrogate = sapo."""
    aipo: AipoConfig = AipoConfig()
    """Settings of surrogate = aipo."""
    dppo: DppoConfig = DppoConfig()
    """Settings of surrogate = dppo_tv."""
    reduction: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens; over sequences of their token means; or sum / (sequences x reduction_tokens) (Dr.GRPO)."""
    reduction_tokens: int | None = Field(None, gt=0)
    """Divisor of reduction = constant: the longest reply."""

    # corrections for the policy that sampled
    importance_correction: bool = True
    """Multiply the loss by exp(prev - generation) logprobs: corrects for the policy that sampled."""
    weight_level: Literal["token", "sequence"] | None = None
    """Those weights per token, or their product over the sequence; default: as `ratio`."""
    truncation: Literal["none", "tis", "icepop", "seq-mask-tis"] = "none"
    """Truncation of those weights."""
    truncation_min: float = Field(0.0, ge=0)
    """Lower bound of the weights."""
    truncation_max: float = Field(2.0, gt=0)
    """Upper bound of the weights."""
    weight_normalisation: bool = False
    """Divide the weights by their mean over the update: truncation then changes no scale."""
    rejection: tuple[RejectionConfig, ...] = ()
    """Rules that keep samples out of the loss; a sample must pass all."""
    sequence_error_threshold: float | None = Field(None, gt=1)
    """Samples whose mean exp|generation - prev| is above this do not train."""
    overlong_filtering: bool = False
    """Replies cut by the length limit do not train."""

    # the reference policy
    kl_coefficient: float = Field(0.0, ge=0)
    """Weight of the KL to the reference policy; 0 = no reference model."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Add the KL to the loss, or subtract it from the reward of its sample."""
    kl_type: Literal["k1", "k2", "k3"] = "k3"
    """KL estimator."""
    kl_input_clamp: float | None = Field(20.0, gt=0)
    """Clamp of the log ratio."""
    kl_output_clamp: float | None = Field(10.0, gt=0)
    """Clamp of the KL term."""
    kl_on_policy_approximation: bool = False
    """Weight the KL of a token by exp(current - generation) logprobs instead of 1."""

    @property
    def rejects_samples(self) -> bool:
        """True if samples may leave the loss by what a pass before the first update says."""
        return bool(self.rejection) or self.sequence_error_threshold is not None

    @property
    def corrects_for_the_sampler(self) -> bool:
        """True if the loss weighs tokens by how likely the policy was to say what the engine said."""
        return self.importance_correction or self._corrects_by_itself

    @property
    def _corrects_by_itself(self) -> bool:
        return self.surrogate in _SAMPLER_SURROGATES or self.old_policy == "generation"

    @model_validator(mode="after")
    def _combinations(self) -> ObjectiveConfig:
        problems = [*self._of_the_surrogate(), *self._of_the_weights(), *self._of_advantages_and_kl()]
        if problems:
            raise ValueError("; ".join(problems))
        return self

    def _of_the_surrogate(self) -> Iterator[str]:
        if self.ratio == "sequence" and self.reduction != "sequence":
            yield "ratio = sequence needs reduction = sequence (GSPO): set objective.reduction"
        if self.ratio != "token" and self.surrogate != "clipped":
            yield f"surrogate = {self.surrogate} has ratios of its own: objective.ratio = {self.ratio} needs clipped"
        if self.dual_clip is not None and self.surrogate != "clipped":
            yield f"dual_clip = {self.dual_clip} bounds surrogate = clipped only, not {self.surrogate}"
        if (self.reduction == "constant") != (self.reduction_tokens is not None):
            yield (
                "reduction = constant and reduction_tokens go together: set objective.reduction_tokens to the longest "
                "reply (sampling.max_tokens), or leave it out"
            )

    def _of_the_weights(self) -> Iterator[str]:
        if self._corrects_by_itself and self.importance_correction:
            own = self.surrogate in _SAMPLER_SURROGATES
            name = f"surrogate = {self.surrogate}" if own else "old_policy = generation"
            yield f"{name} already corrects for the policy that sampled: set objective.importance_correction = false"
        for name, on in (
            (f"truncation = {self.truncation}", self.truncation != "none"),
            ("weight_normalisation = true", self.weight_normalisation),
        ):
            if on and not self.importance_correction:
                yield f"{name} needs importance_correction = true: set objective.importance_correction"
        if self.truncation_min > self.truncation_max:
            yield f"truncation_min {self.truncation_min} > truncation_max {self.truncation_max}"

    def _of_advantages_and_kl(self) -> Iterator[str]:
        if self.baseline == "none" and self.std != "none":
            yield f"baseline = none leaves nothing centred to divide: set objective.std = none (it is {self.std})"
        if self.kl_in == "reward" and not self.kl_coefficient:
            yield "kl_in = reward needs kl_coefficient > 0: set objective.kl_coefficient"
        if self.kl_in == "reward" and self.kl_on_policy_approximation:
            yield "kl_on_policy_approximation weighs a KL in the loss: set objective.kl_in = loss"
        if self.dynamic_sampling and self.baseline == "none":
            yield "dynamic_sampling drops groups of equal rewards, which train under baseline = none"
