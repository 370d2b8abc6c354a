"""What each rank of an engine reads of each source tensor, as services tell one another: windows, and their digest."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.wire import refit_pb2

WindowBody = tuple[int, list[int], list[int]]
"""(offset, shape, strides) in elements of a contiguous tensor."""
NeedsBody = dict[str, list[WindowBody]]
"""Of one rank: source tensor -> its windows, each once."""


def rank_digest(needs: NeedsBody) -> str:
    """Names what one rank reads."""
    return digest_bytes(canonical_json(needs), "refit-rank-needs")


def needs_digest(ranks: Sequence[str]) -> str:
    """Names what all ranks of an engine read, by the digest of each, in their order; "" if one of them has none."""
    return digest_bytes(canonical_json(list(ranks)), "refit-needs") if ranks and all(ranks) else ""


def needs_to_wire(digest: str, ranks: Sequence[NeedsBody]) -> refit_pb2.NeedsReply:
    """The answer to a `Needs` call."""
    reply = refit_pb2.NeedsReply(digest=digest)
    for needs in ranks:
        rank = reply.ranks.add()
        for name, windows in needs.items():
            rank.tensors.add(name=name, windows=[window_to_wire(window) for window in windows])
    return reply


def needs_from_wire(reply: refit_pb2.NeedsReply) -> list[NeedsBody]:
    """Undo `needs_to_wire`."""
    return [
        {tensor.name: [window_from_wire(window) for window in tensor.windows] for tensor in rank.tensors}
        for rank in reply.ranks
    ]


def window_to_wire(window: WindowBody) -> refit_pb2.Window:
    """One window."""
    offset, shape, stride = window
    return refit_pb2.Window(offset=offset, shape=shape, stride=stride)


def window_from_wire(window: refit_pb2.Window) -> WindowBody:
    """Undo `window_to_wire`."""
    return window.offset, list(window.shape), list(window.stride)
