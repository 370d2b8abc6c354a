"""One transfer file in shared memory: tensors in buckets, with a checksum for each bucket and a digest for each tensor.

The layout is that of `omnifleet.wire.manifest`. A file is locked while its sender lives, so that files of a dead sender
can be told from those of a living one, across containers too.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from blake3 import blake3

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import ALIGN_BYTES, bucket_starts
from omnifleet.wire.sparse import ENCODING
from omnifleet_trainer.policy.port import Tensor

if TYPE_CHECKING:
    import torch

PREFIX = "omnifleet-refit-"
_NUMPY = {
    "f8": "F64", "f4": "F32", "f2": "F16", "i8": "I64", "i4": "I32", "i2": "I16", "i1": "I8", "u1": "U8", "b1": "BOOL",
}  # fmt: skip
_TORCH = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32",
    "int16": "I16", "int8": "I8", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class RawTensor:
    """A tensor as bytes: little-endian, row-major. dtype: safetensors name. sparse: what turns its parent's bytes into them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: memoryview
    sparse: memoryview | None = None


def raw_tensor(name: str, tensor: Tensor) -> RawTensor:
    """Bytes of a numpy array or a torch tensor on any device. Raises OmnifleetError(UNSUPPORTED) for its dtype."""
    shape = tuple(int(size) for size in tensor.shape)
    if isinstance(tensor, np.ndarray):
        dtype = _NUMPY.get(tensor.dtype.str[1:], "")
        array = np.ascontiguousarray(tensor, dtype=tensor.dtype.newbyteorder("<"))
        data = array.reshape(-1).view(np.uint8)
    else:
        import torch

        dtype = dtype_name(name, tensor)
        data = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    if not dtype:
        raise OmnifleetError(Reason.UNSUPPORTED, f"{name} has dtype {tensor.dtype}, which no refit carries")
    return RawTensor(name, dtype, shape, memoryview(cast(Any, data)))


def dtype_name(name: str, tensor: torch.Tensor) -> str:
    """safetensors name of a torch tensor's dtype. Raises OmnifleetError(UNSUPPORTED)."""
    dtype = _TORCH.get(str(tensor.dtype).removeprefix("torch."))
    if dtype is None:
        raise OmnifleetError(Reason.UNSUPPORTED, f"{name} has dtype {tensor.dtype}, which no refit carries")
    return dtype


def tensor_digest(data: memoryview) -> str:
    """Plain BLAKE3-256 of a tensor's bytes."""
    return blake3(data, max_threads=blake3.AUTO).hexdigest()


@dataclass(eq=False, slots=True)
class Transfer:
    """A complete file. specs: its tensors by name, with place and digest; buckets: in the order of the file."""

    path: Path
    specs: dict[str, refit_pb2.TensorSpec]
    buckets: list[refit_pb2.Bucket]
    size: int
    _lock: int
    _users: int = 0
    _retired: bool = False
    _map: mmap.mmap | None = field(default=None)

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Inside, the file keeps its name even if it is retired."""
        self._users += 1
        try:
            yield
        finally:
            self._users -= 1
            if self._retired and not self._users:
                self._remove()

    def retire(self) -> None:
        """Remove the file as soon as nobody uses it. Idempotent."""
        if not self._retired:
            self._retired = True
            if not self._users:
                self._remove()

    def read(self, name: str) -> RawTensor:
        """One tensor, mapped from the file. Not of a file with sparse tensors."""
        spec = self.specs[name]
        start = bucket_starts(bucket.bytes for bucket in self.buckets)[spec.bucket] + spec.offset
        if self._map is None:
            self._map = mmap.mmap(self._lock, self.size, prot=mmap.PROT_READ)
        view = memoryview(self._map)[start : start + spec.bytes]
        return RawTensor(name, spec.dtype, tuple(spec.shape), view)

    def _remove(self) -> None:
        self.path.unlink(missing_ok=True)
        os.close(self._lock)


def pack(folder: Path, label: str, tensors: Iterable[RawTensor], bucket_bytes: int) -> Transfer:
    """Write tensors into one new file `folder/omnifleet-refit-LABEL-RANDOM`, mode 0600, as they come.

    A bucket is closed before it would pass `bucket_bytes`; a larger tensor has one for itself. Raises
    OmnifleetError(DISK_FULL) if the memory does not suffice; the file is then gone.
    """
    path = folder / f"{PREFIX}{label}-{secrets.token_hex(4)}"
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        writer = _Writer(handle, bucket_bytes)
        for tensor in tensors:
            writer.add(tensor)
        writer.close_bucket()
    except BaseException as error:
        path.unlink(missing_ok=True)
        os.close(handle)
        if isinstance(error, OSError) and error.errno == errno.ENOSPC:
            raise OmnifleetError(
                Reason.DISK_FULL, f"{folder} has no room for the weights of {label}", knob="size of /dev/shm"
            ) from error
        raise
    return Transfer(path, writer.specs, writer.buckets, sum(b.bytes for b in writer.buckets), handle)


class _Writer:
    """Appends to a file, bucket by bucket."""

    def __init__(self, handle: int, bucket_bytes: int) -> None:
        self._handle, self._limit = handle, bucket_bytes
        self._filled, self._hash = 0, blake3()
        self.specs: dict[str, refit_pb2.TensorSpec] = {}
        self.buckets: list[refit_pb2.Bucket] = []

    def add(self, tensor: RawTensor) -> None:
        stored = tensor.data if tensor.sparse is None else tensor.sparse
        if self._filled and self._filled + stored.nbytes > self._limit:
            self.close_bucket()
        self.specs[tensor.name] = refit_pb2.TensorSpec(
            name=tensor.name,
            dtype=tensor.dtype,
            shape=tensor.shape,
            bucket=len(self.buckets),
            offset=self._filled,
            bytes=tensor.data.nbytes,
            changed=True,
            digest=tensor_digest(tensor.data),
            encoding="" if tensor.sparse is None else ENCODING,
            stored=0 if tensor.sparse is None else stored.nbytes,
        )
        self._write(stored)
        self._write(memoryview(bytes(-self._filled % ALIGN_BYTES)))

    def close_bucket(self) -> None:
        if self._filled:
            checksum = self._hash.hexdigest()
            self.buckets.append(
                refit_pb2.Bucket(index=len(self.buckets), bytes=self._filled, checksum=checksum)
            )
            self._filled, self._hash = 0, blake3()

    def _write(self, data: memoryview) -> None:
        self._hash.update(data)
        self._filled += data.nbytes
        while data.nbytes:
            data = data[os.write(self._handle, data) :]


def sweep(folder: Path) -> list[Path]:
    """Remove transfer files whose sender is gone (nobody holds their lock). Returns what was removed."""
    removed = []
    for path in folder.glob(f"{PREFIX}*"):
        try:
            handle = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
        except OSError:
            continue  # gone, or another user's
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink(missing_ok=True)
            removed.append(path)
        except BlockingIOError:
            pass
        finally:
            os.close(handle)
    return removed
