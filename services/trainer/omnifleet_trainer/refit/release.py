"""The weights of one version, as transfers: all tensors of the lineage's first version, and those changed since.

A delta is cumulative: it holds every tensor that differs from the base, so it fits on top of any version in between.
A step holds what differs from the version just before, and of a tensor of which few values differ these alone: it is
made where it is smaller than the delta, and fits on top of that one version only.
A worker's manifest names the version that this very worker serves as its parent; where a worker holds none of ours, or
is fenced, a complete file is composed from base and delta.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from omnifleet.errors import Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.codec import version_to_wire
from omnifleet.wire.manifest import ALIGN_BYTES, CHECKSUM_ALGORITHM, DTYPE_BYTES, manifest_digest
from omnifleet.wire.sparse import encode_sparse
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.transfer import RawTensor, Transfer, pack, raw_tensor, tensor_digest


@dataclass(frozen=True, slots=True)
class Parcel:
    """What one worker is sent: a manifest, the version that it makes (with its digest), and the file it describes."""

    manifest: refit_pb2.Manifest
    version: WeightVersion
    transfer: Transfer


@dataclass(eq=False, slots=True)
class Release:
    """One version. delta: None for the first version of a lineage, which is `base` itself. step: from version `step_from`."""

    version: WeightVersion
    base: Transfer
    delta: Transfer | None
    encoder_changed: bool
    step: Transfer | None = None
    step_from: int = -1
    sent: int = 0
    """Bytes of the largest file that a publish sent."""
    _complete: Transfer | None = field(default=None)
    _retired: bool = False

    def takes_step(self, parent: WeightVersion) -> bool:
        """True if there is a step from `parent`, a version of this lineage."""
        return self.step is not None and parent.number == self.step_from

    def on_top_of(self, parent: WeightVersion, *, sparse: bool = False) -> Parcel:
        """For a worker that serves `parent`, a version of this lineage. The base itself needs no parent.

        sparse: the worker takes sparse tensors, so a step will do where there is one.
        """
        if self.delta is None:
            return self.complete()
        if sparse and self.step is not None and self.takes_step(parent):
            specs = [self.step.specs.get(name) or _unchanged(self.spec(name)) for name in self.base.specs]
            return self._parcel(specs, self.step, parent)
        tensors = [self.delta.specs.get(name) or _unchanged(spec) for name, spec in self.base.specs.items()]
        return self._parcel(tensors, self.delta, parent)

    def complete(self) -> Parcel:
        """For any worker. Raises CONFLICT, retryable, unless `compose` made the file."""
        transfer = self.base if self.delta is None else self._complete
        if transfer is None:
            raise retryable(Reason.CONFLICT, f"{self.version} has no complete file now")
        return self._parcel(list(transfer.specs.values()), transfer, None)

    def compose(self, folder: Path, bucket_bytes: int) -> None:
        """Write the complete file if there is none: changed tensors from the delta, the others from the base. Blocks."""
        if self.delta is None or self._complete is not None:
            return
        with self.base.in_use(), self.delta.in_use():
            self._complete = pack(folder, f"{_label(self.version)}-complete", self._tensors(), bucket_bytes)
        if self._retired:  # meanwhile, by those who no longer wait for this thread
            self.drop_complete()

    def drop_complete(self) -> None:
        """Remove the composed file; `compose` makes it again."""
        if self._complete is not None:
            self._complete.retire()
            self._complete = None

    def retire(self) -> None:
        """Remove what is of this version alone; the base stays."""
        self._retired = True
        self.drop_complete()
        if self.step is not None:
            self.step.retire()
        if self.delta is not None:
            self.delta.retire()

    def read(self, name: str) -> RawTensor:
        """One tensor of this version, mapped from the file that holds it."""
        return self._holder(name).read(name)

    def spec(self, name: str) -> refit_pb2.TensorSpec:
        """What this version's manifests say of one tensor."""
        return self._holder(name).specs[name]

    def _holder(self, name: str) -> Transfer:
        return self.delta if self.delta is not None and name in self.delta.specs else self.base

    def _tensors(self) -> Iterator[RawTensor]:
        for name in self.base.specs:
            yield self.read(name)

    def _parcel(
        self, tensors: list[refit_pb2.TensorSpec], transfer: Transfer, parent: WeightVersion | None
    ) -> Parcel:
        manifest = refit_pb2.Manifest(
            version=version_to_wire(self.version),
            parent=version_to_wire(parent),
            tensors=tensors,
            buckets=transfer.buckets,
            checksum_algorithm=CHECKSUM_ALGORITHM,
            encoder_changed=self.encoder_changed or parent is None,
        )
        return Parcel(manifest, replace(self.version, manifest_digest=manifest_digest(manifest)), transfer)


def first_release(
    version: WeightVersion, tensors: Iterable[tuple[str, Tensor]], folder: Path, bucket_bytes: int
) -> Release:
    """All tensors: the base of a lineage. Blocks while it copies and hashes."""
    raws = (raw_tensor(name, tensor) for name, tensor in tensors)
    return Release(version, pack(folder, _label(version), raws, bucket_bytes), None, encoder_changed=True)


def next_release(
    version: WeightVersion,
    base: Transfer,
    tensors: Iterable[tuple[str, Tensor]],
    changed: set[str],
    encoder_changed: bool,
    folder: Path,
    bucket_bytes: int,
) -> Release:
    """The tensors named in `changed` whose bytes differ from the base. Blocks while it copies and hashes.

    Where none differs (a learning rate of 0), the smallest is sent, since a version is made by a transfer.
    """
    smallest = min(base.specs.values(), key=lambda spec: spec.bytes).name

    def differing() -> Iterator[RawTensor]:
        spare, found = None, False
        for name, tensor in tensors:
            if name not in changed and name != smallest:
                continue
            raw = raw_tensor(name, tensor)
            if name in changed and tensor_digest(raw.data) != base.specs[name].digest:
                found = True
                yield raw
            elif name == smallest:
                spare = RawTensor(raw.name, raw.dtype, raw.shape, memoryview(bytes(raw.data)))
        if not found and spare is not None:
            yield spare

    delta = pack(folder, _label(version), differing(), bucket_bytes)
    return Release(version, base, delta, encoder_changed)


def add_step(release: Release, before: Release, folder: Path, bucket_bytes: int) -> None:
    """Give a release the step from the one before, if that is smaller than its delta. Blocks while it compares."""
    if release.delta is None:
        return
    with release.base.in_use(), release.delta.in_use(), (before.delta or before.base).in_use():
        moved = _moved(release, before, release.delta.size)
        if moved:
            release.step = pack(folder, f"{_label(release.version)}-step", moved, bucket_bytes)
            release.step_from = before.version.number


def _moved(release: Release, before: Release, limit: int) -> list[RawTensor]:
    """Tensors that differ between two releases, each in its smaller form; none if all of them take `limit` bytes or more."""
    moved, size = [], 0
    for name in release.base.specs:
        if release.spec(name).digest == before.spec(name).digest:
            continue
        old, new = before.read(name), release.read(name)
        alike = (old.dtype, old.shape) == (new.dtype, new.shape)
        payload = encode_sparse(old.data, new.data, DTYPE_BYTES[new.dtype]) if alike else None
        moved.append(new if payload is None else replace(new, sparse=memoryview(payload)))
        stored = new.data.nbytes if payload is None else len(payload)
        size += stored + -stored % ALIGN_BYTES
        if size >= limit:
            return []
    return moved


def _unchanged(spec: refit_pb2.TensorSpec) -> refit_pb2.TensorSpec:
    return refit_pb2.TensorSpec(
        name=spec.name,
        dtype=spec.dtype,
        shape=spec.shape,
        bytes=spec.bytes,
        changed=False,
        digest=spec.digest,
    )


def _label(version: WeightVersion) -> str:
    return f"{version.run}-{version.number}"
