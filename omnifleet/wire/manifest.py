"""The refit manifest byte for byte: what its digest covers, and where each bucket and tensor lies in a transfer file.

Sender and receiver share this file, so that both mean the same bytes. Layout of a shared-memory transfer: buckets back
to back in table order; a tensor starts at its bucket's start plus its own offset, a multiple of ALIGN_BYTES; bytes are
little-endian, row-major.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from typing import Any

from blake3 import blake3

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.types import Digest, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.needs import window_from_wire

ALIGN_BYTES = 64
"""Offsets of tensors and sizes of buckets are multiples of this."""
CHECKSUM_ALGORITHM = "blake3"
"""Of bucket checksums and tensor digests in transfer files. Buckets on devices carry `omnifleet.wire.fold.ALGORITHM`."""
UNVERIFIED = "none"
"""For measuring what verification costs; workers refuse it unless they are told otherwise at their start."""
DTYPE_BYTES = {
    "F64": 8,
    "F32": 4,
    "F16": 2,
    "BF16": 2,
    "I64": 8,
    "I32": 4,
    "I16": 2,
    "I8": 1,
    "U8": 1,
    "BOOL": 1,
}
"""safetensors names of the dtypes that a refit may carry -> bytes of one element."""


def manifest_body(manifest: refit_pb2.Manifest) -> dict[str, Any]:
    """The manifest as plain data. The version's own digest is left out: it is the digest of this."""
    return {
        "buckets": [_bucket_body(bucket) for bucket in manifest.buckets],
        "checksum_algorithm": manifest.checksum_algorithm,
        "encoder_changed": manifest.encoder_changed,
        "parent": _version_body(manifest.parent) if manifest.HasField("parent") else None,
        "tensors": [
            {
                "bucket": t.bucket,
                "bytes": t.bytes,
                "changed": t.changed,
                "digest": t.digest,
                "dtype": t.dtype,
                "name": t.name,
                "offset": t.offset,
                "shape": list(t.shape),
                **({"encoding": t.encoding, "stored": t.stored} if t.encoding else {}),
            }
            for t in manifest.tensors
        ],
        **({"parts": [_part_body(part) for part in manifest.parts]} if manifest.parts else {}),
        "v": 1,
        "version": {
            "lineage": manifest.version.lineage,
            "number": manifest.version.number,
            "run": manifest.version.run,
        },
    }


def manifest_json(manifest: refit_pb2.Manifest) -> bytes:
    """Canonical JSON of the manifest: the bytes that its digest covers."""
    return canonical_json(manifest_body(manifest))


def json_digest(body: bytes) -> Digest:
    """Digest of a manifest that is already canonical JSON."""
    return digest_bytes(body, "refit-manifest")


def manifest_digest(manifest: refit_pb2.Manifest) -> Digest:
    """BLAKE3-256 of the canonical JSON: `WeightVersion.manifest_digest` of the version that it makes."""
    return json_digest(manifest_json(manifest))


def table_digest(tensors: Iterable[refit_pb2.TensorSpec]) -> Digest:
    """Digest of names, dtypes and shapes alone: names the base version of an engine, before any refit."""
    rows = sorted([t.name, t.dtype, list(t.shape)] for t in tensors)
    return digest_bytes(canonical_json(rows), "tensor-table")


def bucket_checksum(data: bytes | memoryview) -> str:
    """Plain BLAKE3-256 of one bucket's bytes, padding included, as 64 hex characters."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


def combined_checksum(digests: Iterable[str]) -> str:
    """Checksum of a bucket on a device: BLAKE3-256 of its tensors' fold digests (hex), in order of offset."""
    return blake3(b"".join(bytes.fromhex(digest) for digest in digests)).hexdigest()


def bucket_starts(bucket_bytes: Iterable[int]) -> list[int]:
    """Byte offset of each bucket within the transfer file; the last entry is the file's size."""
    return [0, *accumulate(bucket_bytes)]


def base_version(tensors: Iterable[refit_pb2.TensorSpec]) -> WeightVersion:
    """The version of an engine that still serves the checkpoint it started from."""
    return WeightVersion(run="", lineage="base", number=0, manifest_digest=table_digest(tensors))


def _bucket_body(bucket: refit_pb2.Bucket) -> dict[str, Any]:
    return {"bytes": bucket.bytes, "checksum": bucket.checksum, "index": bucket.index}


def _part_body(part: refit_pb2.Part) -> dict[str, Any]:
    return {
        "buckets": [_bucket_body(bucket) for bucket in part.buckets],
        "pieces": [
            {
                "bucket": p.bucket,
                "bytes": p.bytes,
                "digest": p.digest,
                "name": p.name,
                "offset": p.offset,
                "window": window_from_wire(p.window),
            }
            for p in part.pieces
        ],
        "ranks": list(part.ranks),
    }


def _version_body(version: Any) -> dict[str, Any]:
    return {
        "lineage": version.lineage,
        "manifest_digest": version.manifest_digest,
        "number": version.number,
        "run": version.run,
    }
