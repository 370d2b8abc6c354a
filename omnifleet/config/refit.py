"""Refits of a recipe: how weights travel, and how a worker shows that it has the right ones."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from omnifleet.config.base import StrictModel


class CanaryConfig(StrictModel):
    """Logprobs of fixed tokens, compared between trainer and engine after each refit."""

    prompt: tuple[int, ...] = tuple(range(10, 26))
    """Token ids of the prompt, text only."""
    reply: tuple[int, ...] = tuple(range(26, 34))
    """Token ids that are scored after it."""
    tolerance: float = Field(0.25, gt=0)
    """Largest difference of one token's logprob, nats. In float32 1e-3 is met; bfloat16 needs some 0.1."""


class RefitConfig(StrictModel):
    """How weights travel from the trainer to the engines; see docs/refit.md."""

    transport: Literal["shm", "nccl", "cuda_ipc"] = "shm"
    """shm: files in shared memory of one host. nccl: broadcast between GPUs (gloo without GPUs). cuda_ipc: mapped by engines
    on GPUs of the trainer's host, its own or others."""
    rolling: bool = False
    """Commit worker after worker, so that the fleet never pauses as a whole."""
    host: str = ""
    """nccl: the trainer's address as workers reach it; default: that of its host's name."""
    bucket_bytes: int = Field(1 << 30, ge=4096)
    """nccl and cuda_ipc: size of a bucket; a larger tensor has one for itself."""
    sparse: bool = True
    """Where few values changed since the version before, send these alone, if that is smaller."""
    without_shadow: Literal["fence", "refuse"] = "fence"
    """What a serving worker does that has no room for a second copy of the weights. fence: it serves nothing while it takes
    them straight into place, one worker at a time. refuse: it serves on with the old ones, for as long as staleness allows."""
    canary: CanaryConfig | None = None
    """Set ({} suffices): a worker beyond the tolerance is quarantined and put back to the version before, which costs the
    trainer the memory of one more version (of what changed in it, where transport is shm)."""
