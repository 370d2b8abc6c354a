"""A version cut for engines of several ranks: each slice goes to the ranks that read it, once, and to no other.

Slices that the same ranks read make a part, with a group of its own: what all ranks read is broadcast to all, what one
reads goes to that one. A part's buckets are made from the snapshot when they are asked for and are not kept, so cutting
costs no second copy of the weights; each is made twice, once for its checksum.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.codec import version_to_wire
from omnifleet.wire.fold import ALGORITHM, ROW_BYTES
from omnifleet.wire.manifest import combined_checksum, manifest_digest
from omnifleet.wire.needs import window_to_wire
from omnifleet_refit.fold import as_hex, fold
from omnifleet_refit.windows import Needs, View
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot


@dataclass(frozen=True, slots=True)
class Slice:
    """A window of a tensor, and where it lies in its part. bytes: without padding."""

    name: str
    view: View
    bucket: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Part:
    """What `ranks` of each engine are sent. sizes: of its buckets, bytes. sender: the trainer's rank that sends it."""

    ranks: tuple[int, ...]
    slices: tuple[Slice, ...]
    sizes: tuple[int, ...]
    sender: int = 0

    @property
    def bytes(self) -> int:
        """Of all its buckets."""
        return sum(self.sizes)


class Cut(Sequence[torch.Tensor]):
    """The buckets of one part, each made on `device` when it is asked for."""

    def __init__(self, part: Part, snapshot: Snapshot, device: torch.device) -> None:
        self._part, self._snapshot, self._device = part, snapshot, device
        self._inside: list[list[Slice]] = [[] for _ in part.sizes]
        for piece in part.slices:
            self._inside[piece.bucket].append(piece)

    def __len__(self) -> int:
        return len(self._part.sizes)

    def __getitem__(self, index: Any) -> Any:
        size = self._part.sizes[index]
        bucket = torch.zeros(size, dtype=torch.uint8, device=self._snapshot.device)
        for piece in self._inside[index]:
            source = self._snapshot.tensor(piece.name)
            window = piece.view.on(source, int(source.storage_offset()))
            room = bucket[piece.offset : piece.offset + piece.bytes]
            room.view(source.dtype).view(window.shape).copy_(window)
        return bucket.to(self._device)

    def folded(self) -> Iterator[list[str]]:
        """Of each bucket the digests of its slices, in their order."""
        for index, inside in enumerate(self._inside):
            yield as_hex(fold(self[index], [piece.offset for piece in inside]))


def parts_of(
    snapshot: Snapshot,
    changed: Collection[str],
    ranks: Sequence[Needs],
    owners: Mapping[str, int] | None = None,
) -> list[Part]:
    """Lay out what the ranks of an engine read of the tensors named. Raises LookupError for needs that don't fit them.

    owners: tensor -> the trainer's rank that sends it; default: the first. All send and take parts in this order, in
    which different senders come to different ranks at first, and change about.
    """
    readers: dict[tuple[str, View], list[int]] = {}
    for rank, needs in enumerate(ranks):
        for name in sorted(needs.keys() & set(changed)):
            for view in needs[name]:
                readers.setdefault((name, view), []).append(rank)
    whose: dict[tuple[tuple[int, ...], int], list[tuple[str, View]]] = {}
    for (name, view), reading in readers.items():
        sender = owners.get(name, 0) if owners else 0
        whose.setdefault((tuple(reading), sender), []).append((name, view))
    audiences = sorted({reading for reading, _ in whose})

    def turn(key: tuple[tuple[int, ...], int]) -> tuple[int, int]:
        reading, sender = key
        return (audiences.index(reading) - sender) % len(audiences), sender

    return [_laid_out(snapshot, *key, whose[key]) for key in sorted(whose, key=turn)]


def part_body(part: Part) -> dict[str, Any]:
    """A part as plain data, for another sender."""
    slices = [[s.name, s.view.body, s.bucket, s.offset, s.bytes] for s in part.slices]
    return {"ranks": part.ranks, "slices": slices, "sizes": part.sizes}


def part_of(body: Mapping[str, Any]) -> Part:
    """Undo `part_body`; whose it is, is not told."""
    slices = [Slice(name, View.parse(view), *place) for name, view, *place in body["slices"]]
    return Part(tuple(body["ranks"]), tuple(slices), tuple(body["sizes"]))


def bytes_of_rank(parts: Sequence[Part]) -> int:
    """What the rank takes that takes most."""
    taken: dict[int, int] = {}
    for part in parts:
        for rank in part.ranks:
            taken[rank] = taken.get(rank, 0) + part.bytes
    return max(taken.values(), default=0)


def cut_shipment(
    snapshot: Snapshot,
    version: WeightVersion,
    parent: WeightVersion | None,
    changed: Collection[str],
    parts: Sequence[Part],
    spoken: Sequence[refit_pb2.Part],
    encoder_changed: bool,
) -> Shipment:
    """The manifest of a version in parts, for workers at `parent`. changed: what they lack of it. spoken: `told` of the parts."""
    specs = [snapshot.spec(name) for name in snapshot.places]
    for spec in specs:
        spec.changed = spec.name in changed
    manifest = refit_pb2.Manifest(
        version=version_to_wire(version),
        parent=version_to_wire(parent),
        tensors=specs,
        parts=spoken,
        checksum_algorithm=ALGORITHM,
        encoder_changed=encoder_changed or parent is None,
    )
    named = replace(version, manifest_digest=manifest_digest(manifest))
    return Shipment(manifest, named, (), sum(part.bytes for part in parts), parts=tuple(parts))


def _laid_out(
    snapshot: Snapshot, ranks: tuple[int, ...], sender: int, windows: Sequence[tuple[str, View]]
) -> Part:
    slices: list[Slice] = []
    sizes: list[int] = []
    for name, view in windows:
        source = snapshot.tensor(name)
        if not view.lies_within(source.numel()):
            raise LookupError(f"a rank reads {view} of {name}, which has {source.numel()} elements")
        size = view.elements * source.element_size()
        padded = size + -size % ROW_BYTES
        if not sizes or sizes[-1] + padded > snapshot.bucket_bytes:
            sizes.append(0)
        slices.append(Slice(name, view, len(sizes) - 1, sizes[-1], size))
        sizes[-1] += padded
    return Part(ranks, tuple(slices), tuple(sizes), sender)


def told(snapshot: Snapshot, parts: Sequence[Part]) -> list[refit_pb2.Part]:
    """Parts as a manifest tells of them, with the digests of their slices. Waits for the device."""
    return [_told(part, Cut(part, snapshot, snapshot.device)) for part in parts]


def _told(part: Part, cut: Cut) -> refit_pb2.Part:
    told = refit_pb2.Part(ranks=part.ranks)
    digests = list(cut.folded())
    for index, (size, inside) in enumerate(zip(part.sizes, digests, strict=True)):
        told.buckets.add(index=index, bytes=size, checksum=combined_checksum(inside))
    for piece, digest in zip(part.slices, [digest for inside in digests for digest in inside], strict=True):
        told.pieces.add(
            name=piece.name,
            window=window_to_wire(piece.view.body),
            bucket=piece.bucket,
            offset=piece.offset,
            bytes=piece.bytes,
            digest=digest,
        )
    return told


def changed_since(snapshot: Snapshot, held: Mapping[str, str] | None) -> set[str]:
    """Names of the tensors that differ from those digests; all where there are none."""
    return {name for name in snapshot.places if held is None or held.get(name) != snapshot.digests[name]}
