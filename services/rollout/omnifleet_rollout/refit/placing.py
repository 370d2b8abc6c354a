"""Weights straight into place, where there is no room for a shadow: bucket by bucket, each verified before it is written.

Nothing serves meanwhile: whoever begins this has seen to it. After an error parameter memory may hold a mixture.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.refit import ipc
from omnifleet_rollout.refit.buckets import Bucket, Memory, layout
from omnifleet_rollout.refit.collective import Collective
from omnifleet_rollout.refit.plan import Plan, replay
from omnifleet_rollout.refit.proving import Windows
from omnifleet_rollout.refit.reception import as_tensor
from omnifleet_rollout.refit.shadow import each_tensor, rejected
from omnifleet_rollout.refit.source import CUDA_IPC, GROUP, Lent
from omnifleet_rollout.refit.weights import Sources, Weights


def arriving(
    body: Mapping[str, Any], source: str, collective: Collective, staging: Memory
) -> Generator[Sources, None, None]:
    """What comes, verified, some tensors at a time; they last until the next are asked for. Close it in the end.

    staging: holds one bucket. Blocks. Raises REFIT_REJECTED, NO_ROOM, UNAVAILABLE, DEADLINE.
    """
    if source.startswith(GROUP):
        return collective.each(body, source, staging)
    if source.startswith(CUDA_IPC):
        return _lent_ones(body, Lent.parse(source), staging)
    return ({tensor.name: as_tensor(tensor)} for tensor in each_tensor(body, Path(source)))


def by_plan(coming: Iterable[Sources], plan: Plan, model: torch.nn.Module, device: torch.device) -> list[str]:
    """Write what comes where the plan says; its names."""
    names: list[str] = []
    for tensors in coming:
        replay(plan.bind(model, tensors))
        names += tensors
        _wait(device)
    return names


def by_loader(
    coming: Iterable[Sources],
    weights: Weights,
    load: Callable[[], None],
    windows: Windows | None,
    device: torch.device,
) -> list[str]:
    """Give what comes to the engine's own loader; its names. windows: see them pass.

    The loader may hold tensors back until their layer is complete, so each is its own. Raises ENGINE_ERROR if it stops early.
    """
    names: list[str] = []

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for tensors in coming:
            for name, tensor in tensors.items():
                if windows is not None:
                    windows.see(name, tensor)
                names.append(name)
                yield name, tensor.clone()
            _wait(device)

    weights.coming = each()
    try:
        load()
        if next(weights.coming, None) is not None:
            raise OmnifleetError(Reason.ENGINE_ERROR, f"the loader took {len(names) - 1} tensors and no more")
    finally:
        weights.coming = None
    return names


def _wait(device: torch.device) -> None:
    """The next bucket comes to where this one lies; and after the last one, work may be given to another stream."""
    if device.type == "cuda":
        torch.cuda.current_stream(device).synchronize()


def _lent_ones(body: Mapping[str, Any], source: Lent, staging: Memory) -> Generator[Sources, None, None]:
    """One bucket after another, as if each were all."""
    buckets = layout(body)
    if any(len(handles) != len(buckets) for handles in source.handles.values()):
        raise rejected(f"there are not {len(buckets)} handles for {len(buckets)} buckets")
    for number, bucket in enumerate(buckets):
        yield ipc.receive(_only(body, bucket), source.only(number), staging)


def _only(body: Mapping[str, Any], bucket: Bucket) -> dict[str, Any]:
    return {
        **body,
        "tensors": [{**tensor, "bucket": 0} for tensor in bucket.tensors],
        "buckets": [{**body["buckets"][bucket.index], "index": 0}],
    }
