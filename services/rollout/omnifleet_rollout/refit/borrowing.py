"""The weights of a version, taken from a worker that serves it: proved by the manifest of whoever made them.

The lender is trusted with nothing. The manifest's digest is part of the version's name; each tensor's digest is in the
manifest; so what arrives is the version that the trainer sent, or is refused.
"""

from __future__ import annotations

import asyncio
import fcntl
import mmap
import os
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Mapping, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.fold import ALGORITHM, ROW_BYTES
from omnifleet.wire.manifest import (
    ALIGN_BYTES,
    CHECKSUM_ALGORITHM,
    bucket_checksum,
    bucket_starts,
    manifest_body,
    manifest_digest,
)
from omnifleet_rollout.refit.shadow import SHARED_MEMORY, check_table, rejected

BUCKET_BYTES = 64 << 20
FETCH_S = 600.0
"""Deadline of all bytes of one version."""
_PREFIX = "omnifleet-refit-peer-"


@dataclass(frozen=True, slots=True)
class Borrowed:
    """original: the manifest that made the version; manifest: of the file at `path`, which holds all of its tensors."""

    original: refit_pb2.Manifest
    manifest: refit_pb2.Manifest
    path: Path


@asynccontextmanager
async def borrowed(
    lender: RefitClient,
    version: WeightVersion,
    table: Mapping[str, tuple[str, Sequence[int]]],
    *,
    folder: Path = SHARED_MEMORY,
) -> AsyncIterator[Borrowed]:
    """Fetch `version` into a file of shared memory, which goes at the end. table: name -> dtype, shape of what we load.

    Raises what the lender says; REFIT_REJECTED if what it sends is not the version; DISK_FULL.
    """
    path = folder / f"{_PREFIX}{version.number}-{secrets.token_hex(4)}"
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX)  # a file that nobody locks is one of a dead process, and swept
        async with aclosing(lender.fetch(version, deadline_s=FETCH_S)) as parts:
            original = await _manifest(parts, version, table)
            manifest = _laid_out(original)
            size = sum(bucket.bytes for bucket in manifest.buckets)
            _reserve(file, size, folder)
            with mmap.mmap(file, size) as data:
                await _fill(data, parts, original, manifest)
        yield Borrowed(original, manifest, path)
    finally:
        path.unlink(missing_ok=True)
        os.close(file)


async def _manifest(
    parts: AsyncGenerator[refit_pb2.Manifest | bytes, None],
    version: WeightVersion,
    table: Mapping[str, tuple[str, Sequence[int]]],
) -> refit_pb2.Manifest:
    """The first part, checked: it is the version's, and fits what we load."""
    first = await anext(parts, None)
    if not isinstance(first, refit_pb2.Manifest):
        raise rejected("the lender sent no manifest")
    digest = manifest_digest(first)
    made = first.version.run, first.version.lineage, first.version.number
    if digest != version.manifest_digest or made != (version.run, version.lineage, version.number):
        raise rejected(f"the lender's manifest is not that of {version}")
    if first.checksum_algorithm not in (CHECKSUM_ALGORITHM, ALGORITHM):
        raise rejected(f"{version} was made without digests")
    # Of its tensors the names, dtypes and shapes count here, not what was in which bucket at the time.
    tensors = [{**tensor, "changed": True, "encoding": ""} for tensor in manifest_body(first)["tensors"]]
    check_table({"tensors": tensors, "parent": None}, table)
    return first


def _laid_out(original: refit_pb2.Manifest) -> refit_pb2.Manifest:
    """A complete manifest of the same version: all tensors, in buckets of a file of our own. Checksums come later."""
    manifest = refit_pb2.Manifest(
        version=original.version, checksum_algorithm=CHECKSUM_ALGORITHM, encoder_changed=True
    )
    manifest.version.manifest_digest = ""
    filled = 0
    for tensor in original.tensors:
        padded = tensor.bytes + -tensor.bytes % ALIGN_BYTES
        if not manifest.buckets or (filled and filled + padded > BUCKET_BYTES):
            manifest.buckets.add(index=len(manifest.buckets))
            filled = 0
        manifest.tensors.add(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bytes=tensor.bytes,
            bucket=len(manifest.buckets) - 1,
            offset=filled,
            changed=True,
        )
        filled += padded
        manifest.buckets[-1].bytes = filled
    return manifest


def _reserve(file: int, size: int, folder: Path) -> None:
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        raise OmnifleetError(
            Reason.DISK_FULL,
            f"{folder} has no room for {size} bytes of weights: {error.strerror}",
            knob="size of /dev/shm",
        ) from error


async def _fill(
    data: mmap.mmap,
    parts: AsyncGenerator[refit_pb2.Manifest | bytes, None],
    original: refit_pb2.Manifest,
    manifest: refit_pb2.Manifest,
) -> None:
    """Write what comes to its place, tensor by tensor, each checked; then sum up the buckets."""
    left = memoryview(b"")
    starts = bucket_starts(bucket.bytes for bucket in manifest.buckets)[:-1]
    for spec, ours in zip(original.tensors, manifest.tensors, strict=True):
        at = starts[ours.bucket] + ours.offset
        end = at + ours.bytes
        while at < end:
            if not left:
                left = memoryview(await _more(parts, spec.name))
            piece, left = left[: end - at], left[end - at :]
            data[at : at + len(piece)] = piece
            at += len(piece)
        ours.digest = await asyncio.to_thread(
            _checked, data, end - ours.bytes, spec, original.checksum_algorithm
        )
    if left or await anext(parts, None) is not None:
        raise rejected("the lender sent more than its tensors")
    for bucket, at in zip(manifest.buckets, starts, strict=True):
        with memoryview(data) as view, view[at : at + bucket.bytes] as piece:
            bucket.checksum = await asyncio.to_thread(bucket_checksum, piece)


async def _more(parts: AsyncGenerator[refit_pb2.Manifest | bytes, None], name: str) -> bytes:
    part = await anext(parts, None)
    if part is None:
        raise retryable(Reason.UNAVAILABLE, f"the lender stopped in {name}")
    if not isinstance(part, bytes) or not part:
        raise rejected("the lender sent another manifest, or nothing")
    return part


def _checked(data: mmap.mmap, at: int, spec: refit_pb2.TensorSpec, algorithm: str) -> str:
    """BLAKE3 of a tensor's bytes, which must match the digest that its maker gave it."""
    with memoryview(data) as view, view[at : at + spec.bytes] as tensor:
        ours = blake3(tensor, max_threads=blake3.AUTO).hexdigest()
        theirs = ours if algorithm == CHECKSUM_ALGORITHM else _folded(tensor)
    if theirs != spec.digest:
        raise rejected(f"{spec.name} from the lender does not match its digest")
    return ours


def _folded(tensor: memoryview) -> str:
    import torch

    from omnifleet_refit.fold import as_hex, fold

    raw = torch.frombuffer(bytearray(tensor), dtype=torch.uint8)
    padded = torch.nn.functional.pad(raw, (0, -raw.numel() % ROW_BYTES))
    return as_hex(fold(padded, [0]))[0]
