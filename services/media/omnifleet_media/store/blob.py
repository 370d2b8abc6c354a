"""What the tiers pass around: a blob's name, and how its bytes are checked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from omnifleet.types import Digest

Measure = Callable[[memoryview], Digest]
"""Computes the digest that `Blob.expected` is compared with."""


class Name(Protocol):
    """Kind and digest: where a blob lives in every tier."""

    @property
    def kind(self) -> str:
        """Folder of the blob."""

    @property
    def digest(self) -> Digest:
        """File name of the blob."""

    @property
    def key(self) -> tuple[str, Digest]:
        """Identity among names."""


def whole(data: memoryview) -> memoryview:
    """All of a blob's bytes."""
    return data


@dataclass(frozen=True, slots=True)
class Blob:
    """A blob that can be checked.

    shared: it belongs in shared memory too, for same-host readers to map. body: the part of the file that readers get.
    """

    kind: str
    digest: Digest
    expected: Digest
    measure: Measure
    shared: bool = True
    body: Callable[[memoryview], memoryview] = whole

    @property
    def key(self) -> tuple[str, Digest]:
        """Identity among blobs."""
        return (self.kind, self.digest)

    def matches(self, data: memoryview) -> bool:
        """True if the bytes are the right ones."""
        return self.measure(data) == self.expected


@dataclass(frozen=True, slots=True)
class Pack:
    """Blobs that same-host readers map together: one file of shared memory, the blobs' bytes in order, then `tail`.

    A copy of what lies below: it goes when one of its blobs, or one `of` which it tells, is removed.
    """

    kind: str
    digest: Digest
    blobs: Sequence[Blob]
    tail: bytes
    bytes: int
    of: Sequence[tuple[str, Digest]]

    @property
    def key(self) -> tuple[str, Digest]:
        """Identity among blobs."""
        return (self.kind, self.digest)
