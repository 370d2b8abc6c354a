"""How the policy is spread over ranks."""

from __future__ import annotations

from pydantic import Field

from omnifleet.config.base import StrictModel


class ParallelConfig(StrictModel):
    """Ranks of the policy: dp x tp x pp x cp processes, one a GPU where there are GPUs."""

    dp: int = Field(1, ge=1)
    """Data: ranks that hold other samples of a step. AutoModel shards the weights over them (FSDP2)."""
    tp: int = Field(1, ge=1)
    """Tensor: ranks that share each layer. Of dense models; automodel: without trainer.lora and trainer.logprob_chunk."""
    pp: int = Field(1, ge=1)
    """Pipeline: stages of ranks that hold other layers. megatron only."""
    ep: int = Field(1, ge=1)
    """Experts: ranks, of those that hold the same layers, that share the experts of a mixture. automodel: without tp."""
    cp: int = Field(1, ge=1)
    """Context: ranks that share a sequence. megatron only, packed."""
    sp: bool = False
    """Sequence: ranks of tp share what is between their layers, too. megatron only; a mixture with tp needs it."""
    distributed_optimizer: bool = False
    """megatron: keep optimiser state sharded over dp. AutoModel always does."""
    nodes: int = Field(1, ge=1)
    """Nodes with as many ranks each; the trainer's is the first, `omnifleet trainer follow` runs on the others."""
    host: str | None = None
    """Address of the trainer's node that the others reach; default: what its host name stands for."""
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
        if self.world % self.nodes:
            return "nodes", f"{self.world} ranks are not as many on each of {self.nodes} nodes"
        if self.world // self.nodes % self.tp:
            return "tp", f"ranks of tp {self.tp} stay on one node, and a node has {self.world // self.nodes}"
        if backend == "automodel" and self.ep > 1 and self.tp > 1:
            return "ep", "the automodel backend divides experts or layers, not both: set ep = 1 or tp = 1"
        if self.ep > 1 and self.tp > 1 and not self.sp:
            return "sp", "a mixture of experts with tp > 1 needs sequence parallelism: set sp = true"
        stage = self.dp * self.together
        if stage % self.ep:
            return (
                "ep",
                f"ep {self.ep} does not divide the dp x tp x cp = {stage} ranks that hold the same layers",
            )
        if self.sp and self.tp == 1:
            return "sp", "sequence parallelism is of the ranks of tp: set tp > 1, or sp = false"
        if backend == "fake" and self.world > 1:
            return "dp", "the fake policy computes nothing: set every size to 1"
        if backend == "automodel":
            for name, wanted in (("pp", 1), ("cp", 1), ("sp", False)):
                if getattr(self, name) != wanted:
                    return (
                        name,
                        f"the automodel backend does not divide that: set {name} = {wanted}, or trainer.backend = megatron",
                    )
            if self.distributed_optimizer:
                return (
                    "distributed_optimizer",
                    "the automodel backend has no such choice: its state is sharded anyway",
                )
        return None
