"""Transport `cuda_ipc`: the sender's memory, on a GPU of this host, is mapped, copied into our shadow and verified.

Whole tensors come in the manifest's buckets. Slices are cut here, out of buckets that the sender keeps anyway: it makes
nothing for us, and this rank reads what is its own and no more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire.fold import ROW_BYTES
from omnifleet.wire.manifest import DTYPE_BYTES
from omnifleet_refit import lent
from omnifleet_refit.windows import View
from omnifleet_rollout.refit.buckets import DTYPES, Bucket, Memory, Verification, layout, made_whole
from omnifleet_rollout.refit.pieces import Leg
from omnifleet_rollout.refit.shadow import rejected
from omnifleet_rollout.refit.source import Lent

Lying = Mapping[int, torch.Tensor]
"""Buckets of the sender's, mapped, by number."""
Copy = Callable[[int, torch.Tensor, Lying], None]
"""Fills one of our buckets: takes its number, its buffer, and what is mapped."""


def receive(body: Mapping[str, Any], source: Lent, memory: Memory) -> dict[str, torch.Tensor]:
    """Copy and verify all buckets; views of the tensors. The copy is checked, not the sender's memory.

    Blocks. Raises REFIT_REJECTED, NO_ROOM, UNSUPPORTED if our GPU can't reach the sender's.
    """
    buckets, handles = layout(body), _handles(source, memory.device)
    if len(handles) != len(buckets):
        raise rejected(f"{len(handles)} handles for {len(buckets)} buckets")
    buffers = memory.take([bucket.size for bucket in buckets], sum(made_whole(body).values()))

    def copy(number: int, data: torch.Tensor, lying: Lying) -> None:
        data.copy_(_within(lying, number, 0, len(data)))

    _bring(body, buckets, buffers, dict(enumerate(handles)), copy)
    return memory.cut(buckets, buffers)


def receive_legs(
    body: Mapping[str, Any], source: Lent, legs: Sequence[Leg], memory: Memory
) -> dict[str, torch.Tensor]:
    """Like `receive`, of the slices that this rank takes; the tensors by their names in the legs' buckets."""
    if not legs:
        return {}
    handles = _handles(source, memory.device)
    places = _places(body, source, legs, len(handles))
    inside = [(bucket, leg) for leg in legs for bucket in leg.buckets]
    buckets = [bucket for bucket, _ in inside]
    buffers = memory.take([bucket.size for bucket in buckets])

    def copy(number: int, data: torch.Tensor, lying: Lying) -> None:
        data.zero_()  # what lies between slices
        bucket, leg = inside[number]
        for piece in bucket.tensors:
            name, view = leg.keys[piece["name"]]
            into = data[piece["offset"] : piece["offset"] + piece["bytes"]]
            _cut(lying, places[name], view, into)

    _bring(body, buckets, buffers, {place.bucket: handles[place.bucket] for place in places.values()}, copy)
    return memory.cut(buckets, buffers)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a whole tensor lies in the sender's buckets."""

    bucket: int
    offset: int
    bytes: int
    dtype: torch.dtype


def _handles(source: Lent, device: torch.device) -> Sequence[lent.Handle]:
    """Those for our own GPU, else for one that it reaches."""
    own = lent.gpu_of(device)
    for gpu in sorted(source.handles, key=lambda gpu: gpu != own):
        if gpu == own or lent.may_reach(device, gpu):
            return source.handles[gpu]
    raise _unsupported(
        f"the weights are on GPU {', '.join(source.handles) or 'none'}, whose memory this engine's GPU {own} cannot read"
    )


def _unsupported(message: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.UNSUPPORTED,
        f"{message}: cuda_ipc wants both on one host, peer access between them and, in containers, both given to this one; "
        "else set refit.transport = nccl or shm",
        knob="refit.transport",
    )


def _places(body: Mapping[str, Any], source: Lent, legs: Sequence[Leg], buckets: int) -> dict[str, _Place]:
    """Of the tensors that the legs have slices of. Raises REFIT_REJECTED."""
    table = {tensor["name"]: tensor for tensor in body["tensors"]}
    places = {}
    for name in {name for leg in legs for name, _ in leg.keys.values()}:
        if name not in source.places:
            raise rejected(f"slices of {name} are to be cut, and nothing says where it lies")
        bucket, offset = source.places[name]
        dtype, size = table[name]["dtype"], prod(table[name]["shape"])
        if not 0 <= bucket < buckets or offset < 0 or offset % ROW_BYTES:
            raise rejected(f"{name} does not lie at {offset} of bucket {bucket} of {buckets}")
        places[name] = _Place(bucket, offset, size * DTYPE_BYTES[dtype], DTYPES[dtype])
    return places


def _bring(
    body: Mapping[str, Any],
    buckets: Sequence[Bucket],
    buffers: Sequence[torch.Tensor],
    handles: Mapping[int, lent.Handle],
    copy: Copy,
) -> None:
    device = buffers[0].device
    with _mapped(handles, device) as lying:
        verification = Verification(body, device)
        for number, (bucket, data) in enumerate(zip(buckets, buffers, strict=True)):
            copy(number, data, lying)
            verification.queue(bucket, data)
        verification.check()


@contextmanager
def _mapped(handles: Mapping[int, lent.Handle], device: torch.device) -> Iterator[Lying]:
    """Inside, a stream of our own is the current one: torch waits for that as it unmaps, and would wait for the engine's.

    Nothing is mapped any more in the end, also after an error, whose traceback keeps what functions hold.
    """
    lying: dict[int, torch.Tensor] = {}
    with _own_stream(device) as wait:
        try:
            for number, handle in handles.items():
                lying[number] = _map(handle, device)
            yield lying
        finally:
            wait()
            lying.clear()


@contextmanager
def _own_stream(device: torch.device) -> Iterator[Callable[[], None]]:
    if device.type != "cuda":
        yield lambda: None
        return
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield stream.synchronize


def _map(handle: lent.Handle, device: torch.device) -> torch.Tensor:
    try:
        return lent.mapped(handle, device)
    except (RuntimeError, TypeError, ValueError) as error:
        why = str(error).partition("\n")[0]
        raise _unsupported(
            f"the sender's memory cannot be mapped on GPU {lent.gpu_of(device)} ({why})"
        ) from error


def _within(lying: Lying, bucket: int, offset: int, size: int) -> torch.Tensor:
    if offset + size > len(lying[bucket]):
        raise rejected(
            f"{size} bytes at {offset} lie beyond the {len(lying[bucket])} that are lent of bucket {bucket}"
        )
    return lying[bucket][offset : offset + size]


def _cut(lying: Lying, place: _Place, view: View, into: torch.Tensor) -> None:
    """One slice. In a function of its own, so that no name is left for what is mapped."""
    whole = _within(lying, place.bucket, place.offset, place.bytes).view(place.dtype)
    into.view(place.dtype).view(view.shape).copy_(view.on(whole, int(whole.storage_offset())))
