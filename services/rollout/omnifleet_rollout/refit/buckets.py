"""Buckets in memory of the device: their layout by the manifest, their checksums, the tensors in them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from omnifleet.wire.fold import ALGORITHM, ROW_BYTES
from omnifleet.wire.manifest import DTYPE_BYTES, UNVERIFIED, combined_checksum
from omnifleet.wire.sparse import ENCODING
from omnifleet_refit.fold import as_hex, digests, row_sums
from omnifleet_rollout.refit.shadow import LIMIT_ENV, no_room, rejected

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True, slots=True)
class Bucket:
    """One bucket of a manifest, checked: its tensors in order of offset, each from a row's start, none over another."""

    index: int
    size: int
    checksum: str
    tensors: tuple[Mapping[str, Any], ...]

    @property
    def starts(self) -> list[int]:
        """Byte offsets of the tensors."""
        return [tensor["offset"] for tensor in self.tensors]


def layout(body: Mapping[str, Any]) -> list[Bucket]:
    """The buckets of a manifest body for device transports. Raises REFIT_REJECTED, before any memory is taken."""
    if body["checksum_algorithm"] not in (ALGORITHM, UNVERIFIED):
        raise rejected(f"checksum_algorithm {body['checksum_algorithm']!r}: device buckets carry {ALGORITHM}")
    if [bucket["index"] for bucket in body["buckets"]] != list(range(len(body["buckets"]))):
        raise rejected("buckets must be numbered 0, 1, 2, ... in order")
    inside: dict[int, list[Mapping[str, Any]]] = {}
    for tensor in body["tensors"]:
        if tensor["changed"]:
            inside.setdefault(tensor["bucket"], []).append(tensor)
    if not set(inside) <= set(range(len(body["buckets"]))):
        raise rejected("a tensor lies in a bucket that the manifest does not have")
    buckets = []
    for bucket in body["buckets"]:
        tensors = tuple(sorted(inside.get(bucket["index"], ()), key=lambda tensor: tensor["offset"]))
        _check_places(tensors, bucket["bytes"])
        buckets.append(Bucket(bucket["index"], bucket["bytes"], bucket["checksum"], tensors))
    return buckets


def _check_places(tensors: Sequence[Mapping[str, Any]], size: int) -> None:
    end = 0
    for tensor in tensors:
        if tensor.get("encoding", "") not in ("", ENCODING):
            raise rejected(
                f"{tensor['name']} is {tensor['encoding']!r}, which is not known; allowed: {ENCODING}"
            )
        wanted = prod(tensor["shape"]) * DTYPE_BYTES.get(tensor["dtype"], 0)
        if wanted != tensor["bytes"] or wanted == 0 or stored(tensor) == 0:
            raise rejected(f"{tensor['name']}: {tensor['bytes']} bytes do not fit its shape and dtype")
        if tensor["offset"] % ROW_BYTES or tensor["offset"] < end:
            raise rejected(
                f"{tensor['name']} at {tensor['offset']} lies over another or not at a row's start"
            )
        end = tensor["offset"] + stored(tensor)
    if size % ROW_BYTES or not end <= size or size == 0:
        raise rejected(f"a bucket of {size} bytes does not hold its tensors, which end at {end}")


def stored(tensor: Mapping[str, Any]) -> int:
    """Bytes of a tensor in its bucket."""
    return int(tensor["stored"] if tensor.get("encoding") else tensor["bytes"])


def made_whole(body: Mapping[str, Any]) -> dict[str, int]:
    """Sparse tensors of a manifest body, and the bytes that each takes when it is whole, in rows."""
    sparse = [tensor for tensor in body["tensors"] if tensor["changed"] and tensor.get("encoding")]
    return {tensor["name"]: tensor["bytes"] + -tensor["bytes"] % ROW_BYTES for tensor in sparse}


class Memory:
    """Buffers of one device, kept from refit to refit, so that a stage allocates nothing after the largest.

    limit: bytes that they may take in all; None: what the device has.
    """

    def __init__(self, device: torch.device, limit: int | None = None) -> None:
        self.device, self.limit = device, limit
        self._buffer = torch.empty(0, dtype=torch.uint8, device=device)
        self._taken = 0
        self._cut: tuple[object, dict[str, torch.Tensor]] = (None, {})
        self.derived: tuple[object, Any] = (None, None)
        """What somebody made of what `cut` gave, and that: kept for as long as the memory is."""

    @property
    def size(self) -> int:
        """Bytes that are held."""
        return len(self._buffer)

    def take(self, sizes: Sequence[int], aside: int = 0) -> list[torch.Tensor]:
        """uint8 buffers of these sizes; what the last take gave is no longer valid. Raises NO_ROOM.

        aside: bytes that are wanted besides, see `aside`.
        """
        taken = sum(sizes)
        if self.size < taken + aside:
            self.release()
            self._buffer = self._room(taken + aside)
        self._taken = taken
        return list(torch.split(self._buffer[: self._taken], list(sizes)))

    def aside(self, size: int) -> torch.Tensor:
        """Zeros behind what was taken, for what is made of it: at most as many as `take` was told."""
        return self._buffer[self._taken : self._taken + size].zero_()

    def cut(self, buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
        """The tensors of all buckets by name: views, no copies; the same dict again for the same places.

        Thousands of views are made beside the engine's thread, so they are kept while the layout stays.
        """
        places = [
            (t["name"], t["offset"], t["dtype"], t["shape"], stored(t)) for b in buckets for t in b.tensors
        ]
        key = (buffers[0].data_ptr(), [bucket.size for bucket in buckets], places)
        if self._cut[0] != key:
            self._cut = (key, cut(buckets, buffers))
        return self._cut[1]

    def release(self) -> None:
        """Give the memory back."""
        self._buffer, self._taken = torch.empty(0, dtype=torch.uint8, device=self.device), 0
        self._cut, self.derived = (None, {}), (None, None)

    def _room(self, size: int) -> torch.Tensor:
        """A row more than asked: no tensor in it has the storage to itself, so whoever keeps one copies it."""
        if self.limit is not None and size > self.limit:
            raise no_room(f"no room for a shadow of {size} bytes: {LIMIT_ENV} is {self.limit}")
        try:
            return torch.empty(size + ROW_BYTES, dtype=torch.uint8, device=self.device)
        except (torch.OutOfMemoryError, RuntimeError) as error:
            raise no_room(f"no room for a shadow of {size} bytes on {self.device}: {error}") from error


class Verification:
    """Checksums of buckets as they come: queued at once, looked at in the end.

    On CUDA they have a stream of their own: in the stream of the transfer each would hold up the next bucket.
    """

    def __init__(self, body: Mapping[str, Any], device: torch.device) -> None:
        self._off = body["checksum_algorithm"] == UNVERIFIED
        self._beside = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        self._sums: list[tuple[Bucket, torch.Tensor]] = []

    def queue(self, bucket: Bucket, data: torch.Tensor) -> None:
        """Sum up one bucket on its device, without waiting."""
        if self._off:
            return
        if self._beside is None:
            self._sums.append((bucket, row_sums(data)))
            return
        self._beside.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._beside):
            self._sums.append((bucket, row_sums(data)))

    def check(self) -> None:
        """Wait for the sums and compare digests. Raises REFIT_REJECTED, naming a tensor whose bytes differ."""
        if not self._sums:
            return
        if self._beside is not None:
            torch.cuda.current_stream().wait_stream(self._beside)
        starts, base = [], 0
        for bucket, _ in self._sums:
            starts += [base + start for start in bucket.starts]
            base += bucket.size
        rows = as_hex(digests(torch.cat([sums for _, sums in self._sums]), starts))
        at = 0
        for bucket, _ in self._sums:
            ours = rows[at : at + len(bucket.tensors)]
            at += len(bucket.tensors)
            for tensor, digest in zip(bucket.tensors, ours, strict=True):
                if not tensor.get("encoding") and digest != tensor["digest"]:
                    raise rejected(f"{tensor['name']} in bucket {bucket.index} does not match its checksum")
            if combined_checksum(ours) != bucket.checksum:
                raise rejected(f"bucket {bucket.index} does not match its checksum")


def cut(buckets: Sequence[Bucket], buffers: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors of all buckets by name: views, no copies. Of a sparse one its bytes, uint8."""
    return {
        tensor["name"]: _shaped(tensor, data[tensor["offset"] : tensor["offset"] + stored(tensor)])
        for bucket, data in zip(buckets, buffers, strict=True)
        for tensor in bucket.tensors
    }


def _shaped(tensor: Mapping[str, Any], data: torch.Tensor) -> torch.Tensor:
    return data if tensor.get("encoding") else data.view(DTYPES[tensor["dtype"]]).view(tuple(tensor["shape"]))
