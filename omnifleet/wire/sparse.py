"""The sparse form of a tensor that changed in few places: which elements, and their new bits. Exact, whatever the dtype.

Layout: the ascending indices of the elements that differ (uint32, uint64 where a tensor has more elements than that
counts), then as many elements. Little-endian; elements are compared and carried as integers, so NaNs and signed zeros
are like any other bits. Nothing is counted in the bytes themselves: their number tells how many elements there are.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

ENCODING = "sparse-1"
_MANY = 1 << 32


def encode_sparse(old: bytes | memoryview, new: bytes | memoryview, width: int) -> bytes | None:
    """What turns `old` into `new`; None unless that is smaller than `new`. width: bytes of one element, 1, 2, 4 or 8.

    Raises ValueError if the two have different lengths, or no whole number of elements.
    """
    before, after = _elements(old, width), _elements(new, width)
    if before.size != after.size:
        raise ValueError(f"{before.size} and {after.size} elements cannot be compared")
    differ = before != after
    index = _index_dtype(after.size)
    if int(np.count_nonzero(differ)) * (index.itemsize + width) >= after.nbytes:
        return None
    places = np.flatnonzero(differ)
    return places.astype(index).tobytes() + after[places].tobytes()


def apply_sparse(data: bytearray, payload: bytes | bytearray | memoryview, width: int) -> None:
    """Turn the old bytes in `data` into the new ones. Raises ValueError, `data` unchanged, for what `encode_sparse` never makes."""
    elements = _elements(data, width)
    index = _index_dtype(elements.size)
    count, rest = divmod(len(payload), index.itemsize + width)
    if rest:
        raise ValueError(f"{len(payload)} bytes are no whole number of indices and elements")
    places = np.frombuffer(payload, index, count)
    values = np.frombuffer(payload, elements.dtype, count, offset=count * index.itemsize)
    if count and (int(places[-1]) >= elements.size or bool((places[1:] <= places[:-1]).any())):
        raise ValueError("the indices do not ascend within the tensor")
    elements[places] = values


def _elements(data: bytes | bytearray | memoryview, width: int) -> NDArray[np.unsignedinteger]:
    return np.frombuffer(data, np.dtype(f"<u{width}"))


def _index_dtype(elements: int) -> np.dtype[np.unsignedinteger]:
    return np.dtype("<u4") if elements <= _MANY else np.dtype("<u8")
