"""What can be wrong with a refit: damages to its manifest and to its buckets, and how each is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from omnifleet.wire.fold import ROW_BYTES
from omnifleet.wire.manifest import UNVERIFIED
from omnifleet.wire.refit_pb2 import Manifest


def _unknown(m: Manifest) -> None:
    m.tensors[0].name = "stranger"


def _missing(m: Manifest) -> None:
    del m.tensors[0]


def _twice(m: Manifest) -> None:
    m.tensors.append(m.tensors[0])


def _dtype(m: Manifest) -> None:
    m.tensors[0].dtype = "I32"


def _shape(m: Manifest) -> None:
    m.tensors[0].shape[0] += 1


def _cut(m: Manifest) -> None:
    m.tensors[0].bytes -= 4


def _over(m: Manifest) -> None:
    m.tensors[1].offset, m.tensors[1].bucket = m.tensors[0].offset, m.tensors[0].bucket


def _numbers(m: Manifest) -> None:
    m.buckets[0].index, m.buckets[1].index = 1, 0


def _small(m: Manifest) -> None:
    m.buckets[0].bytes = ROW_BYTES


def _unverified(m: Manifest) -> None:
    m.checksum_algorithm = UNVERIFIED


def _alone(m: Manifest) -> None:
    m.tensors[0].changed = False


def _sparse(m: Manifest) -> None:
    m.tensors[0].encoding = "sparse-1"
    m.parent.CopyFrom(m.version)


MANIFESTS: dict[str, tuple[Callable[[Manifest], None], str]] = {
    "unknown name": (_unknown, "stranger"),
    "missing name": (_missing, "missing 1"),
    "duplicated name": (_twice, "twice"),
    "wrong dtype": (_dtype, "I32"),
    "wrong shape": (_shape, "the engine loads"),
    "wrong size": (_cut, "do not fit"),
    "one tensor over another": (_over, "over another"),
    "buckets numbered wrongly": (_numbers, "numbered"),
    "bucket too small": (_small, "does not hold"),
    "no checksums": (_unverified, "without checksums"),
    "unchanged since no parent": (_alone, "no parent"),
    "sparse on a version that is not here": (_sparse, "builds on"),
}
"""Of a complete refit: the change, and words of the refusal."""


def changed(manifest: Manifest, change: Callable[[Manifest], None]) -> Manifest:
    """A copy of a manifest, damaged."""
    copy = Manifest()
    copy.CopyFrom(manifest)
    change(copy)
    return copy


def damaged(buckets: Sequence[torch.Tensor], fault: str) -> list[torch.Tensor]:
    """Copies of buckets, on their device; the first of them is damaged after its checksums were made."""
    first, *rest = [bucket.clone() for bucket in buckets]
    if fault == "flipped":
        first[-4000] ^= 1
    elif fault == "reordered":
        first = first.view(-1, ROW_BYTES).roll(1, 0).reshape(-1)
    elif fault == "shifted":
        first = first.roll(4)
    elif fault == "zeroed":
        first.zero_()
    elif fault == "truncated":
        first = first[:-ROW_BYTES]
    elif fault == "swapped":
        first, rest[0] = rest[0], first
    elif fault == "missing":
        rest.pop()
    else:
        raise AssertionError(fault)
    return [first, *rest]
