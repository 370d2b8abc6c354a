"""Files of shared memory in pages of 2 MiB, where Linux has them: one page instead of 512 to make, map and let go.

Nothing depends on them: where the kernel has none, both functions do the same with small pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import sys
from contextlib import suppress

import numpy as np

HUGE = 2 << 20
_COLLAPSE = 25  # MADV_COLLAPSE: Linux 6.1, whatever /sys/kernel/mm/transparent_hugepage says of shared memory
_FIXED = 0x10  # MAP_FIXED
_FAILED = ctypes.c_void_p(-1).value


def make_room(fd: int, size: int) -> None:
    """Give a new, empty file its length, and huge pages as far as it fills them. Raises OSError (ENOSPC included)."""
    os.ftruncate(fd, size)
    whole = size // HUGE * HUGE
    if not whole or sys.platform != "linux":
        return
    for at in range(0, whole, HUGE):
        os.pwrite(fd, b"\0", at)  # a range without any page is left alone
    with suppress(OSError):  # no room for one more map
        data = np.frombuffer(map_file(fd, whole), np.uint8)
        _libc().madvise(ctypes.c_void_p(data.ctypes.data), ctypes.c_size_t(whole), _COLLAPSE)


def map_file(fd: int, size: int, flags: int = 0) -> memoryview:
    """A read-only, shared map of the first `size` bytes, where huge pages can be mapped as such. Raises OSError.

    flags: more of mmap's, such as MAP_POPULATE. It ends with the last view of it.
    """
    if size < HUGE or sys.platform != "linux":
        return memoryview(mmap.mmap(fd, size, mmap.MAP_SHARED | flags, mmap.PROT_READ))
    span = mmap.mmap(-1, size + HUGE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, mmap.PROT_READ)
    base = np.frombuffer(span, np.uint8).ctypes.data
    start = -base % HUGE
    # Over a part of a span that Python owns, and that is unmapped as a whole when nothing refers to it any more.
    got = _libc().mmap(
        ctypes.c_void_p(base + start),
        ctypes.c_size_t(size),
        mmap.PROT_READ,
        mmap.MAP_SHARED | _FIXED | flags,
        fd,
        ctypes.c_long(0),
    )
    if got == _FAILED:
        error = ctypes.get_errno()
        raise OSError(error, os.strerror(error))
    return memoryview(span)[start : start + size]


def _libc() -> ctypes.CDLL:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_void_p
    return libc
