"""The policy's checkpoint, and how rollouts are drawn from it."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omnifleet.config.base import StrictModel

UNTAUGHT = ("nemotron_omni", "nemotron_omni_moe", "nemotron_omni_sound")
"""Families of tiny models that no lesson exists for."""


class ModelConfig(StrictModel):
    """The policy's checkpoint."""

    path: str
    """Hugging Face folder, or `tiny`: the small model that `omnifleet tiny-model` makes."""
    family: (
        Literal["qwen2_vl", "qwen2_5_vl", "nemotron_omni", "nemotron_omni_moe", "nemotron_omni_sound"] | None
    ) = None
    """Of the tiny model; default: qwen2_vl, and qwen2_5_vl for the megatron backend, which has no Qwen2-VL. Those of
    Nemotron Omni have random weights: no lessons exist for them. A folder says its own."""
    freeze: tuple[str, ...] = ()
    """Glob patterns over parameter names that stay fixed; a pattern that matches nothing is an error."""
    trust_remote_code: bool = False
    """Run code that comes with the checkpoint."""


class SamplingConfig(StrictModel):
    """How rollouts are drawn."""

    temperature: float = Field(1.0, ge=0)
    """Softmax temperature; the trainer divides its logits by the same value."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Nucleus; 1 = off."""
    top_k: int = Field(-1, ge=-1)
    """Best-k; -1 = off."""
    max_tokens: int = Field(1024, gt=0)
    """Longest reply, tokens."""
    cap_to_context: bool = False
    """Replies end where `rollout.engine.max_model_len` does, also before `max_tokens`; off: every prompt leaves all of it."""
    stop: tuple[str, ...] = ()
    """Strings that end a reply."""
    bad_words: tuple[str, ...] = ()
    """Words of one token each that are never sampled. Only with raw logprobs, which are those without the ban."""
