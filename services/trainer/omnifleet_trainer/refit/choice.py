"""What workers are sent of a version that lies in a snapshot: the step, parts, or buckets; the same to all of one send.

Chosen by bytes. A step is at most half of the buckets that it stands for. Parts are worth it where no rank takes nearly
as much as in buckets, and the sender does not send notably more. Workers that differ get what all of them can take.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from omnifleet.types import WeightVersion
from omnifleet_refit.windows import Needs
from omnifleet_trainer.refit.parts import (
    bytes_of_rank,
    changed_since,
    cut_shipment,
    parts_of,
    told,
)
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot

_WORTH = 0.9
"""Of what a rank takes in buckets: in parts it must take less than this share."""
_MORE = 1.05
"""So much more the sender may send in parts: rows are padded, and slices that overlap go twice."""


@dataclass(frozen=True, slots=True)
class Taker:
    """parent: the version of ours that a worker holds, and its digests; None: it needs everything. sparse: it takes steps."""

    parent: WeightVersion | None
    held: Mapping[str, str] | None
    sparse: bool


def choose(
    snapshot: Snapshot,
    version: WeightVersion,
    takers: Mapping[str, Taker],
    needs: Sequence[Needs],
    encoder_changed: bool,
    owners: Mapping[str, int] | None = None,
) -> dict[str, Shipment]:
    """Worker id -> what it is sent. needs: what the ranks of each worker read; empty if they differ, or take tensors whole.

    owners: see `parts_of`. Who needs everything gets it whole, so that an engine can check its plan against it. Waits for
    the device.
    """
    steps = _steps(snapshot, version, takers, encoder_changed)
    if len(steps) == len(takers):
        return steps
    together = set[int]().union(*(snapshot.needed(taker.held) for taker in takers.values()))
    if needs and snapshot.digests and together and all(taker.parent is not None for taker in takers.values()):
        limit = sum(len(snapshot.buckets[bucket]) for bucket in together)
        cut = _parts(snapshot, version, takers, needs, encoder_changed, limit, owners)
        if cut:
            return cut
    return {
        id: snapshot.shipment(version, taker.parent, taker.held, encoder_changed, together)
        for id, taker in takers.items()
    }


def _steps(
    snapshot: Snapshot, version: WeightVersion, takers: Mapping[str, Taker], encoder_changed: bool
) -> dict[str, Shipment]:
    steps = {}
    for id, taker in takers.items():
        if taker.sparse and taker.parent is not None and taker.held is not None:
            step = snapshot.step_on(version, taker.parent, taker.held, encoder_changed)
            if step is not None:
                steps[id] = step
    return steps


def _parts(
    snapshot: Snapshot,
    version: WeightVersion,
    takers: Mapping[str, Taker],
    needs: Sequence[Needs],
    encoder_changed: bool,
    limit: int,
    owners: Mapping[str, int] | None,
) -> dict[str, Shipment]:
    """Nothing where buckets, of `limit` bytes, are as good, or where what the engines read does not fit the weights."""
    changed = set[str]().union(*(changed_since(snapshot, taker.held) for taker in takers.values()))
    try:
        parts = parts_of(snapshot, changed, needs, owners)
    except LookupError:
        return {}
    if (
        not parts
        or sum(part.bytes for part in parts) > _MORE * limit
        or bytes_of_rank(parts) >= _WORTH * limit
    ):
        return {}
    spoken = told(snapshot, parts)
    return {
        id: cut_shipment(snapshot, version, taker.parent, changed, parts, spoken, encoder_changed)
        for id, taker in takers.items()
    }
