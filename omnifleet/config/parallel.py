"""How the policy is spread over ranks."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel


class ParallelConfig(StrictModel):
    """Ranks of the policy: dp x tp x pp x cp processes on the trainer's node, one a GPU where there are GPUs."""

    dp: int = Field(1, ge=1)
    """Data: ranks that hold other samples of a step. AutoModel shards the weights over them (FSDP2)."""
    tp: int = Field(1, ge=1)
    """Tensor: ranks that share each layer. megatron only."""
    pp: int = Field(1, ge=1)
    """Pipeline: stages of ranks that hold other layers. megatron only."""
    ep: int = Field(1, ge=1)
    """Experts: ranks, of those of dp, that share the experts of a mixture. megatron only."""
    cp: int = Field(1, ge=1)
    """Context: ranks that share a sequence. No backend has it yet."""
    sp: bool = False
    """Sequence: ranks of tp share what is between their layers, too. No backend has it yet."""
    distributed_optimizer: bool = False
    """megatron: keep optimiser state sharded over dp. AutoModel always does."""
    timeout_s: float = Field(600.0, gt=0)
    """Longest wait of a rank for the others, inside a call of the policy and between two."""

    @property
    def world(self) -> int:
        """Number of ranks."""
        return self.dp * self.tp * self.pp * self.cp

    @property
    def together(self) -> int:
        """Neighbouring ranks of one stage that hold the same samples."""
        return self.tp * self.cp

    def data_rank(self, rank: int) -> int:
        """Whose samples rank `rank` holds. Neighbours are of one tensor-parallel group, then of data, last of stages:
        what talks most lies closest."""
        return rank // self.together % self.dp

    def refused(self, backend: str) -> tuple[str, str] | None:
        """(field, why) of a size that `backend` does not have, or that fits no other; None if all is well."""
        if self.ep > 1 and self.tp > 1:
            return (
                "tp",
                "a mixture of experts with tp > 1 needs sequence parallelism, and that Transformer Engine",
            )
        if self.dp % self.ep:
            return "ep", f"ep {self.ep} does not divide dp {self.dp}: ranks of experts are ranks of data"
        if self.sp:
            return (
                "sp",
                "sequence parallelism needs Transformer Engine, which no policy here is built on: set sp = false",
            )
        if self.cp > 1:
            return (
                "cp",
                "context parallelism needs Transformer Engine, which no policy here is built on: set cp = 1",
            )
        if backend == "fake" and self.world > 1:
            return "dp", "the fake policy computes nothing: set every size to 1"
        if backend == "automodel":
            for name in ("tp", "pp", "ep"):
                if getattr(self, name) > 1:
                    return (
                        name,
                        f"the automodel backend shards over dp only: set {name} = 1, or trainer.backend = megatron",
                    )
            if self.distributed_optimizer:
                return (
                    "distributed_optimizer",
                    "the automodel backend has no such choice: its state is sharded anyway",
                )
        return None
