"""Reading a transfer file: is the manifest whole, are the bytes what it says. Runs in the process that holds the weights.

Imports no torch: the vLLM extension makes tensors of these bytes, the fake engine counts them.
"""

from __future__ import annotations

import mmap
import os
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire.manifest import (
    CHECKSUM_ALGORITHM,
    DTYPE_BYTES,
    UNVERIFIED,
    bucket_checksum,
    bucket_starts,
)
from omnifleet.wire.sparse import ENCODING, apply_sparse

_FLOATS = frozenset({"F64", "F32", "F16", "BF16"})
SHARED_MEMORY = Path("/dev/shm")
LIMIT_ENV = "OMNIFLEET_REFIT_SHADOW_BYTES"


@dataclass(frozen=True, slots=True)
class ShadowTensor:
    """One tensor of the shadow: raw little-endian bytes, safetensors dtype name, shape."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytearray


def rejected(message: str) -> OmnifleetError:
    """A refit that must not be loaded; the weights that serve are untouched."""
    return OmnifleetError(Reason.REFIT_REJECTED, message, knob="send a complete refit")


def no_room(message: str) -> OmnifleetError:
    """There is no memory for a shadow; the weights that serve are untouched."""
    return OmnifleetError(Reason.NO_ROOM, message, knob="refit.without_shadow")


def shadow_limit() -> int | None:
    """The most bytes that a shadow may take of this process's device or host; None: what there is."""
    told = os.environ.get(LIMIT_ENV)
    return int(told) if told else None


def check_table(body: Mapping[str, Any], table: Mapping[str, tuple[str, Sequence[int]]]) -> None:
    """Compare a manifest body with what the engine loads: name -> (dtype, shape). Raises REFIT_REJECTED.

    Floating dtypes may differ from the checkpoint's (the engine's loaders cast); everything else must agree.
    """
    tensors = body["tensors"]
    names = [t["name"] for t in tensors]
    if len(set(names)) != len(names):
        raise rejected("the manifest names a tensor twice")
    missing, unknown = sorted(set(table) - set(names)), sorted(set(names) - set(table))
    if missing or unknown:
        raise rejected(
            f"the manifest must name the engine's {len(table)} tensors; missing {_few(missing)}, unknown {_few(unknown)}"
        )
    for tensor in tensors:
        dtype, shape = table[tensor["name"]]
        floats = dtype in _FLOATS and tensor["dtype"] in _FLOATS
        if list(shape) != list(tensor["shape"]) or not (floats or dtype == tensor["dtype"]):
            raise rejected(
                f"{tensor['name']} is {tensor['dtype']}{list(tensor['shape'])}, the engine loads {dtype}{list(shape)}"
            )
        if body["parent"] is None and not tensor["changed"]:
            raise rejected(f"{tensor['name']} is marked unchanged, but the manifest has no parent")
        if body["parent"] is None and tensor.get("encoding"):
            raise rejected(f"{tensor['name']} is {tensor['encoding']}, but the manifest has no parent")


def check_whole(body: Mapping[str, Any]) -> None:
    """Raises REFIT_REJECTED for a manifest body that does not bring, and prove, every tensor whole."""
    if body["parent"] is not None or body.get("parts"):
        raise rejected("without a shadow a refit must be complete, in whole tensors")
    if body["checksum_algorithm"] == UNVERIFIED:
        raise rejected("without a shadow nothing is taken that has no checksums")


Held = Callable[[str], bytes | bytearray | memoryview]
"""The bytes of a tensor of the committed version, by name. Raises REFIT_REJECTED if they are not kept."""


def _nothing_held(name: str) -> bytes:
    raise rejected(f"{name} is sparse, and nothing is held here to make it whole")


def read_transfer(body: Mapping[str, Any], path: Path, held: Held = _nothing_held) -> list[ShadowTensor]:
    """Copy and verify every changed tensor of a transfer file in shared memory. Raises REFIT_REJECTED."""
    return list(each_tensor(body, path, held))


def each_tensor(body: Mapping[str, Any], path: Path, held: Held = _nothing_held) -> Iterator[ShadowTensor]:
    """Like `read_transfer`, bucket by bucket: nothing is to be used before the last one came.

    The copy is checked, not the file: a sender that writes while we read is caught. A sparse tensor is made whole from
    what is held, and the whole is checked against its digest.
    """
    starts = bucket_starts(bucket["bytes"] for bucket in body["buckets"])
    if body["checksum_algorithm"] != CHECKSUM_ALGORITHM:
        raise rejected(
            f"checksum_algorithm {body['checksum_algorithm']!r} is not known; allowed: {CHECKSUM_ALGORITHM}"
        )
    if [bucket["index"] for bucket in body["buckets"]] != list(range(len(body["buckets"]))):
        raise rejected("buckets must be numbered 0, 1, 2, ... in order")
    by_bucket: dict[int, list[Mapping[str, Any]]] = {}
    for tensor in body["tensors"]:
        if tensor["changed"]:
            by_bucket.setdefault(tensor["bucket"], []).append(tensor)
    if not set(by_bucket) <= set(range(len(body["buckets"]))):
        raise rejected("a tensor lies in a bucket that the manifest does not have")
    with _mapped(path, starts[-1]) as source:
        for bucket, (start, end) in zip(body["buckets"], pairwise(starts), strict=True):
            data = bytearray(source[start:end])
            if bucket_checksum(memoryview(data)) != bucket["checksum"]:
                raise rejected(f"bucket {bucket['index']} of {path} does not match its checksum")
            for tensor in by_bucket.get(bucket["index"], ()):
                yield _cut(tensor, data, held)


def _cut(tensor: Mapping[str, Any], bucket: bytearray, held: Held) -> ShadowTensor:
    encoding = tensor.get("encoding", "")
    wanted = prod(tensor["shape"]) * DTYPE_BYTES.get(tensor["dtype"], 0)
    start, end = tensor["offset"], tensor["offset"] + (tensor["stored"] if encoding else tensor["bytes"])
    if wanted != tensor["bytes"] or wanted == 0 or end > len(bucket):
        raise rejected(
            f"{tensor['name']}: {tensor['bytes']} bytes at {start} do not fit its shape or its bucket"
        )
    data = _filled(tensor, bucket[start:end], held) if encoding else bucket[start:end]
    return ShadowTensor(tensor["name"], tensor["dtype"], tuple(tensor["shape"]), data)


def _filled(tensor: Mapping[str, Any], payload: bytearray, held: Held) -> bytearray:
    """The whole tensor, from its sparse form and the committed version's bytes."""
    if tensor["encoding"] != ENCODING:
        raise rejected(f"{tensor['name']} is {tensor['encoding']!r}, which is not known; allowed: {ENCODING}")
    data = bytearray(held(tensor["name"]))
    if len(data) != tensor["bytes"]:
        raise rejected(f"{tensor['name']} is held in {len(data)} bytes, the manifest says {tensor['bytes']}")
    try:
        apply_sparse(data, payload, DTYPE_BYTES[tensor["dtype"]])
    except ValueError as error:
        raise rejected(f"{tensor['name']}: {error}") from error
    if bucket_checksum(memoryview(data)) != tensor["digest"]:
        raise rejected(f"{tensor['name']} does not match its digest when it is made whole")
    return data


def _mapped(path: Path, size: int) -> mmap.mmap:
    """Map a transfer file read-only. Only regular files of our own user in shared memory are opened."""
    if not path.resolve().is_relative_to(SHARED_MEMORY):
        raise rejected(f"transfer file {path} is not in {SHARED_MEMORY}")
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise rejected(f"transfer file {path} cannot be opened: {error.strerror}") from error
    try:
        info = os.fstat(file)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
            raise rejected(f"transfer file {path} is not a regular file of this user")
        if info.st_size < size or size == 0:
            raise rejected(f"transfer file {path} has {info.st_size} bytes, the manifest says {size}")
        return mmap.mmap(file, size, prot=mmap.PROT_READ)
    finally:
        os.close(file)


def _few(names: Sequence[str]) -> str:
    return f"{len(names)} ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''})" if names else "none"
