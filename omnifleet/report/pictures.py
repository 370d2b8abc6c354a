"""Pixels as PNG, for pages."""

from __future__ import annotations

import io

import numpy as np
import numpy.typing as npt
from PIL import Image


def to_png(pixels: npt.NDArray[np.uint8]) -> bytes:
    """uint8 RGB (H, W, 3) as PNG bytes."""
    out = io.BytesIO()
    Image.fromarray(np.asarray(pixels)).save(out, "PNG")
    return out.getvalue()
