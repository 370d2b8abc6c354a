"""All weights of one version in buckets on a device: packed once, then sent to whoever needs them, in whole or in part.

Packing copies, so training may go on at once. Tensors lie in a fixed order, those that never train first, so that a
bucket that trains carries little that does not. Digests are computed on the device; a bucket none of whose tensors
changed since the version that a worker holds is not sent to it.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.codec import version_to_wire
from omnifleet.wire.fold import ALGORITHM, ROW_BYTES
from omnifleet.wire.manifest import UNVERIFIED, combined_checksum, manifest_digest
from omnifleet_refit.fold import as_hex, fold
from omnifleet_trainer.policy.port import Tensor
from omnifleet_trainer.refit.step import Step, make_step
from omnifleet_trainer.refit.transfer import dtype_name

if TYPE_CHECKING:
    from omnifleet_trainer.refit.parts import Part

log = logging.getLogger("omnifleet.trainer.refit")
BUCKET_BYTES = 1 << 30
"""Fewer and larger buckets: each costs the receiver's thread a few turns beside its engine's."""


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor lies. bytes: without padding."""

    dtype: str
    shape: tuple[int, ...]
    bucket: int
    offset: int
    bytes: int


@dataclass(frozen=True, slots=True)
class Shipment:
    """What workers that hold one version are sent: the manifest and the numbers of the buckets, in its order.

    step: the buckets are those of the snapshot's step. parts: there are no buckets but those that parts are made in.
    """

    manifest: refit_pb2.Manifest
    version: WeightVersion
    buckets: tuple[int, ...]
    bytes: int
    step: bool = False
    parts: tuple[Part, ...] = ()


class Snapshot:
    """One version's weights on `device`; `pack` again replaces them by the next version's, in the same places."""

    def __init__(
        self, device: torch.device, bucket_bytes: int = BUCKET_BYTES, *, verified: bool = True
    ) -> None:
        self.device, self._limit, self._verified = device, bucket_bytes, verified
        self.buckets: list[torch.Tensor] = []
        self.places: dict[str, Place] = {}
        self.digests: dict[str, str] = {}
        self.step: Step | None = None
        """From the version that was packed before, if it is worth it."""
        self._views: dict[str, torch.Tensor] = {}

    def pack(
        self, tensors: Iterable[tuple[str, Tensor]], trains: Collection[str] = (), *, sparse: bool = False
    ) -> None:
        """Copy all tensors in and compute their digests. trains: names that may change after this version.

        sparse: also make a step from the version before, where few values of those changed.

        Raises INVALID_REQUEST if a later version has other names, dtypes or shapes; UNSUPPORTED for a dtype.
        """
        given = {name: torch.as_tensor(tensor).detach() for name, tensor in tensors}
        if not self.places:
            self._lay_out(given, set(trains))
        self._check(given)
        self.step = (
            self._step({n: given[n] for n in trains if n in given}) if sparse and self.digests else None
        )
        names = list(self._views)
        with torch.no_grad():
            torch._foreach_copy_(
                [self._views[name] for name in names], [given[name].contiguous() for name in names]
            )
        self.digests = self._fold() if self._verified else {}

    def copy_to_host(self, kept: Snapshot | None = None) -> Snapshot:
        """This version in host memory, to send it once more after the next `pack`. kept: an earlier copy, to write over.

        Buckets that are in `kept` already are not copied again. Blocks. Raises MemoryError if there is no room.
        """
        pinned = self.device.type == "cuda"
        fresh = Snapshot(torch.device("cpu"), self._limit, verified=self._verified)
        fresh.places, fresh.digests = self.places, dict(self.digests)
        stale = self.needed(kept.digests if kept else None)
        try:
            fresh.buckets = (
                kept.buckets
                if kept
                else [torch.empty(len(b), dtype=b.dtype, pin_memory=pinned) for b in self.buckets]
            )
        except RuntimeError as error:
            raise MemoryError(f"no host memory for a second version of the weights: {error}") from error
        for number in stale:
            fresh.buckets[number].copy_(self.buckets[number], non_blocking=pinned)
        if pinned:
            torch.cuda.synchronize(self.device)
        return fresh

    def shipment(
        self,
        version: WeightVersion,
        parent: WeightVersion | None,
        held: Mapping[str, str] | None,
        encoder_changed: bool,
        also: Collection[int] = (),
    ) -> Shipment:
        """For workers at `parent`, whose digests are `held`; None: everything. At least one bucket is sent.

        also: buckets that go along because others need them.
        """
        needed = {*self.needed(held), *also}
        chosen = tuple(sorted(needed)) or (min(range(len(self.buckets)), key=lambda i: len(self.buckets[i])),)
        numbers = {bucket: number for number, bucket in enumerate(chosen)}
        manifest = refit_pb2.Manifest(
            version=version_to_wire(version),
            parent=version_to_wire(parent),
            tensors=[self._spec(name, numbers) for name in self.places],
            buckets=[self._bucket(number, bucket) for bucket, number in numbers.items()],
            checksum_algorithm=ALGORITHM if self._verified else UNVERIFIED,
            encoder_changed=encoder_changed or parent is None,
        )
        digest = manifest_digest(manifest)
        size = sum(len(self.buckets[bucket]) for bucket in chosen)
        return Shipment(manifest, replace(version, manifest_digest=digest), chosen, size)

    def step_on(
        self, version: WeightVersion, parent: WeightVersion, held: Mapping[str, str], encoder_changed: bool
    ) -> Shipment | None:
        """The step, for workers at `parent`, whose digests are `held`; None if there is none from there."""
        step = self.step
        if step is None or step.since != held:
            return None
        specs = [self.spec(name) for name in self.places]
        for spec in specs:
            step.enter(spec)
        manifest = refit_pb2.Manifest(
            version=version_to_wire(version),
            parent=version_to_wire(parent),
            tensors=specs,
            buckets=step.table(),
            checksum_algorithm=ALGORITHM,
            encoder_changed=encoder_changed,
        )
        named = replace(version, manifest_digest=manifest_digest(manifest))
        return Shipment(manifest, named, tuple(range(len(step.buckets))), step.bytes, step=True)

    def contents(self, shipment: Shipment) -> list[torch.Tensor]:
        """The buckets of a shipment, in its manifest's order."""
        buckets = self.step.buckets if shipment.step and self.step is not None else self.buckets
        return [buckets[number] for number in shipment.buckets]

    @property
    def bucket_bytes(self) -> int:
        """What a bucket holds, unless one tensor is larger."""
        return self._limit

    def tensor(self, name: str) -> torch.Tensor:
        """One tensor as it lies here, contiguous: a view."""
        return self._views[name]

    def spec(self, name: str) -> refit_pb2.TensorSpec:
        """A tensor's line in a manifest that has it in no bucket."""
        return self._spec(name, {})

    def needed(self, held: Mapping[str, str] | None) -> set[int]:
        """Buckets in which a tensor differs from what a worker holds."""
        return {
            place.bucket
            for name, place in self.places.items()
            if held is None or not self._verified or held.get(name) != self.digests[name]
        }

    def _lay_out(self, tensors: Mapping[str, torch.Tensor], trains: set[str]) -> None:
        sizes: list[int] = []
        for group in ([n for n in tensors if n not in trains], [n for n in tensors if n in trains]):
            fresh = True
            for name in group:
                tensor = tensors[name]
                padded = tensor.nbytes + -tensor.nbytes % ROW_BYTES
                if fresh or sizes[-1] + padded > self._limit:
                    sizes.append(0)
                place = Place(
                    dtype_name(name, tensor), tuple(tensor.shape), len(sizes) - 1, sizes[-1], tensor.nbytes
                )
                self.places[name] = place
                sizes[-1] += padded
                fresh = False
        self.buckets = [torch.zeros(size, dtype=torch.uint8, device=self.device) for size in sizes]
        for name, place in self.places.items():
            raw = self.buckets[place.bucket][place.offset : place.offset + place.bytes]
            self._views[name] = raw.view(tensors[name].dtype).view(place.shape)

    def _check(self, tensors: Mapping[str, torch.Tensor]) -> None:
        if tensors.keys() != self.places.keys():
            raise _other(f"names {sorted(tensors.keys() ^ self.places.keys())[:3]}")
        for name, tensor in tensors.items():
            place = self.places[name]
            if (dtype_name(name, tensor), tuple(tensor.shape)) != (place.dtype, place.shape):
                raise _other(
                    f"{name} {tensor.dtype} {tuple(tensor.shape)} instead of {place.dtype} {place.shape}"
                )

    def _step(self, moved: Mapping[str, torch.Tensor]) -> Step | None:
        """From what lies here to what is packed next. moved: the tensors that may differ, by name."""
        pairs = {name: (self._views[name], tensor) for name, tensor in moved.items()}
        if any(old.device != new.device for old, new in pairs.values()):
            return None
        stands_for = sum(len(self.buckets[b]) for b in {self.places[name].bucket for name in moved})
        try:
            with torch.no_grad():
                return make_step(self.digests, pairs, stands_for, self._limit)
        except torch.OutOfMemoryError as error:
            log.warning("no memory to compare two versions, so buckets are sent: %s", error)
            return None

    def _fold(self) -> dict[str, str]:
        inside = self._inside()
        folds = [
            fold(data, [self.places[n].offset for n in names])
            for data, names in zip(self.buckets, inside, strict=True)
        ]
        rows = as_hex(torch.cat(folds))
        return dict(zip([name for names in inside for name in names], rows, strict=True))

    def _inside(self) -> list[list[str]]:
        inside: list[list[str]] = [[] for _ in self.buckets]
        for name, place in self.places.items():
            inside[place.bucket].append(name)
        return inside

    def _spec(self, name: str, numbers: Mapping[int, int]) -> refit_pb2.TensorSpec:
        place = self.places[name]
        sent = place.bucket in numbers
        return refit_pb2.TensorSpec(
            name=name,
            dtype=place.dtype,
            shape=place.shape,
            bucket=numbers[place.bucket] if sent else 0,
            offset=place.offset if sent else 0,
            bytes=place.bytes,
            changed=sent,
            digest=self.digests.get(name, ""),
        )

    def _bucket(self, number: int, bucket: int) -> refit_pb2.Bucket:
        names: Sequence[str] = [name for name, place in self.places.items() if place.bucket == bucket]
        checksum = combined_checksum(self.digests[name] for name in names) if self._verified else ""
        return refit_pb2.Bucket(index=number, bytes=len(self.buckets[bucket]), checksum=checksum)


def _other(what: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.INVALID_REQUEST, f"the weights are not those of the first version of this lineage: {what}"
    )
