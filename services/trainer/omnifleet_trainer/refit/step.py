"""What changed on the device since the version before, in buckets of its own.

A tensor of which few values changed goes as index and value (`omnifleet.wire.sparse`), another changed one whole; those
that did not change are not there. Bits are compared before the next version is copied over the last, so no second copy
of the weights is kept: a step costs what it holds, at most half of the buckets that it stands for.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from omnifleet.wire import refit_pb2
from omnifleet.wire.fold import ROW_BYTES
from omnifleet.wire.manifest import combined_checksum
from omnifleet.wire.sparse import ENCODING
from omnifleet_refit.fold import as_hex, fold
from omnifleet_refit.sparse import encode, sparse_sizes

_WORTH = 2
"""A step is made where the buckets that it stands for are so many times larger."""


@dataclass(frozen=True, slots=True)
class Entry:
    """Where a tensor lies in a step, and in how many bytes. sparse: in its sparse form."""

    bucket: int
    offset: int
    stored: int
    sparse: bool


@dataclass(frozen=True, slots=True)
class Step:
    """since: digests of the version that it starts from. It fits on that one alone."""

    since: Mapping[str, str]
    entries: Mapping[str, Entry]
    buckets: Sequence[torch.Tensor]
    checksums: Sequence[str]

    @property
    def bytes(self) -> int:
        """Of its buckets."""
        return sum(map(len, self.buckets))

    def enter(self, spec: refit_pb2.TensorSpec) -> None:
        """Say in a tensor's line of a manifest where it lies, if it is here."""
        entry = self.entries.get(spec.name)
        spec.changed = entry is not None
        if entry is None:
            return
        spec.bucket, spec.offset = entry.bucket, entry.offset
        if entry.sparse:
            spec.encoding, spec.stored = ENCODING, entry.stored

    def table(self) -> list[refit_pb2.Bucket]:
        """Its buckets, as a manifest tells of them."""
        return [
            refit_pb2.Bucket(index=index, bytes=len(bucket), checksum=checksum)
            for index, (bucket, checksum) in enumerate(zip(self.buckets, self.checksums, strict=True))
        ]


def make_step(
    since: Mapping[str, str],
    pairs: Mapping[str, tuple[torch.Tensor, torch.Tensor]],
    stands_for: int,
    bucket_bytes: int,
) -> Step | None:
    """The step that `pairs` (name -> old, new) make. stands_for: bytes that would be sent else. Waits for the device.

    None if nothing changed, or if it would take more than half of those bytes.
    """
    sizes = dict(zip(pairs, sparse_sizes(pairs.values()), strict=True))
    smaller = {name: size < pairs[name][1].nbytes for name, (_, size) in sizes.items()}
    changed = [name for name, (count, _) in sizes.items() if count]
    stored = {name: sizes[name][1] if smaller[name] else pairs[name][1].nbytes for name in changed}
    padded = {name: size + -size % ROW_BYTES for name, size in stored.items()}
    if not changed or sum(padded.values()) * _WORTH > stands_for:
        return None
    entries: dict[str, Entry] = {}
    filled: list[int] = []
    for name in changed:
        if not filled or filled[-1] + padded[name] > bucket_bytes:
            filled.append(0)
        entries[name] = Entry(len(filled) - 1, filled[-1], stored[name], smaller[name])
        filled[-1] += padded[name]
    device = pairs[changed[0]][0].device
    buckets = [torch.zeros(size, dtype=torch.uint8, device=device) for size in filled]
    for name, entry in entries.items():
        old, new = pairs[name]
        data = encode(old, new) if entry.sparse else new.contiguous().view(-1).view(torch.uint8)
        buckets[entry.bucket][entry.offset : entry.offset + entry.stored].copy_(data)
    return Step(since, entries, buckets, _checksums(entries, buckets))


def _checksums(entries: Mapping[str, Entry], buckets: Sequence[torch.Tensor]) -> list[str]:
    """Of each bucket: of what is stored in it."""
    inside: list[list[int]] = [[] for _ in buckets]
    for entry in entries.values():
        inside[entry.bucket].append(entry.offset)
    return [
        combined_checksum(as_hex(fold(bucket, starts)))
        for bucket, starts in zip(buckets, inside, strict=True)
    ]
