"""Sparse tensors made whole on the device: from what came and what is held, proved by the digest of the whole."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import accumulate
from typing import Any

import torch

from omnifleet.wire.manifest import UNVERIFIED
from omnifleet_refit.fold import as_hex, fold
from omnifleet_refit.sparse import decode
from omnifleet_rollout.refit.buckets import DTYPES, Memory, made_whole
from omnifleet_rollout.refit.shadow import rejected

Sources = dict[str, torch.Tensor]
Held = Callable[[str], torch.Tensor]
"""A source tensor of the committed version, by name. Raises REFIT_REJECTED if it is not to be had."""


def fill(body: Mapping[str, Any], tensors: Sources, held: Held, memory: Memory) -> Sources:
    """`tensors`, verified as they came, with each sparse one made whole. Blocks. Raises REFIT_REJECTED.

    body: of the manifest. What is held is read beside the engine's steps; nothing writes it before the next commit.
    """
    sparse = [t for t in body["tensors"] if t["changed"] and t.get("encoding")]
    if not sparse:
        return tensors
    if body["checksum_algorithm"] == UNVERIFIED:
        raise rejected("sparse tensors need digests")
    starts = [0, *accumulate(made_whole(body).values())]
    try:
        with _beside(memory.device):
            room = memory.aside(starts[-1])
            whole = {}
            for tensor, start in zip(sparse, starts[:-1], strict=True):
                into = room[start : start + tensor["bytes"]].view(DTYPES[tensor["dtype"]])
                whole[tensor["name"]] = into.view(tuple(tensor["shape"]))
                _make(whole[tensor["name"]], tensor["name"], tensors[tensor["name"]], held)
            for tensor, digest in zip(sparse, as_hex(fold(room, starts[:-1])), strict=True):
                if digest != tensor["digest"]:
                    raise rejected(f"{tensor['name']} does not match its digest when it is made whole")
    except torch.OutOfMemoryError as error:
        raise rejected(f"no room on {memory.device} to make sparse tensors whole: {error}") from error
    return tensors | whole


def _make(into: torch.Tensor, name: str, payload: torch.Tensor, held: Held) -> None:
    """One tensor; what it takes besides goes before the next."""
    old = held(name)
    if (old.dtype, old.shape) != (into.dtype, into.shape):
        raise rejected(
            f"{name} is held as {old.dtype}{list(old.shape)}, the manifest says {into.dtype}{list(into.shape)}"
        )
    into.copy_(old)
    try:
        decode(payload, into)
    except ValueError as error:
        raise rejected(f"{name} cannot be made whole: {error}") from error


@contextmanager
def _beside(device: torch.device) -> Iterator[None]:
    """On CUDA a stream of its own, that begins when all that the device was given is done, and is waited for."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.synchronize(device)
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    with torch.cuda.device(device), torch.cuda.stream(stream):
        yield
        stream.synchronize()
