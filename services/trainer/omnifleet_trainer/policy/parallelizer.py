"""Experts on several ranks through AutoModel's seam for it: a model's class may own a `parallelizer` (nemo-automodel 0.7).

AutoModel asks it to spread the model, and goes on to load and train what comes back. Imported only where ranks share experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import nemo_automodel
from nemo_automodel.components.distributed.mesh import MeshContext
from nemo_automodel.components.distributed.parallelizer import ModelParallelizer
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from transformers import PreTrainedModel

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.expert_parallel import EXPERTS, GROUPS, divide


@contextmanager
def dividing(mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> Iterator[None]:
    """The model of transformers that AutoModel builds inside has its experts on the ranks of `mesh` (`experts_mesh`).

    Raises OmnifleetError(UNSUPPORTED) if AutoModel did not ask.
    """
    every: Any = PreTrainedModel  # which of its classes, AutoModel finds out as it builds
    every.parallelizer = ours = ExpertParallelizer(mesh, precision)
    try:
        yield
    finally:
        del every.parallelizer
    if not ours.apart:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"nemo-automodel {nemo_automodel.__version__} divided no experts: set ep = 1",
            knob="trainer.parallel.ep",
        )


class ExpertParallelizer(ModelParallelizer):  # type: ignore[misc]
    """AutoModel's own, with experts left out of FSDP2's units; FSDP2 spreads them over the ranks that hold the same ones."""

    def __init__(self, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
        self._mesh, self._precision = mesh, precision
        self.apart: set[nn.Parameter] = set()

    def parallelize(self, model: nn.Module, mesh_context: MeshContext, /) -> nn.Module:
        """See `ModelParallelizer`."""
        for experts in [module for name, module in model.named_modules() if name.endswith(".experts")]:
            divide(experts, self._mesh[EXPERTS], self._precision.param_dtype)
            if self._mesh[GROUPS].size() > 1:
                fully_shard(
                    experts,
                    mesh=self._mesh[GROUPS],
                    mp_policy=self._precision,
                    shard_placement_fn=lambda _: Shard(1),  # the first axis is divided already
                )
            self.apart |= set(experts.parameters())
        spread: nn.Module = super().parallelize(model, mesh_context)
        return spread

    def _fully_shard_module(self, module: nn.Module, **settings: Any) -> Any:
        ignored = set(settings.pop("ignored_params", None) or ()) | self.apart & set(module.parameters())
        return super()._fully_shard_module(module, ignored_params=ignored or None, **settings)
