"""Safetensors as views of a buffer: no copy, no torch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.errors import OmnifleetError, Reason

Tensors = dict[str, npt.NDArray[Any]]

_DTYPES = {"F32": "<f4", "F16": "<f2", "F64": "<f8", "I64": "<i8", "I32": "<i4", "U8": "|u1", "BOOL": "|b1"}


def read_tensors(buffer: memoryview) -> Tensors:
    """The tensors of a safetensors file as read-only arrays over `buffer`, without a copy. Raises CORRUPT."""
    try:
        size = int.from_bytes(buffer[:8], "little")
        header: Mapping[str, Any] = json.loads(bytes(buffer[8 : 8 + size]))
        body = buffer[8 + size :]
        return {name: _array(body, entry) for name, entry in header.items() if name != "__metadata__"}
    except (ValueError, KeyError, TypeError) as error:
        raise OmnifleetError(Reason.CORRUPT, f"not a safetensors file that we can read: {error!r}") from error


def _array(body: memoryview, entry: Mapping[str, Any]) -> npt.NDArray[Any]:
    start, end = entry["data_offsets"]
    array = np.frombuffer(body[start:end], np.dtype(_DTYPES[entry["dtype"]])).reshape(entry["shape"])
    array.flags.writeable = False
    return array
