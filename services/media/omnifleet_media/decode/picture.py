"""Pictures to canonical pixels: RGB uint8, oriented, opaque. Runs in a decoder process (role "pictures").

The rules are those of docs/api/addresses.md; a change of one is a new `address.contract.RULES`.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import PIL
from PIL import Image, UnidentifiedImageError

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.sandbox.frames import Header, Room

Pixels = npt.NDArray[np.uint8]

_ORIENTATION = 0x0112
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
_SIXTEEN_BIT = ("I;16", "I;16L", "I;16B", "I;16N", "I")
BUNDLE = "frames"
"""The codec of a bundle of lossless frames (`omnifleet_media.ingest.frame_manifest`)."""


def prepare() -> Header:
    """Our own limit replaces Pillow's warning; what is imported later is imported here, before files are out of reach."""
    from omnifleet_media.decode import animation, bundle  # noqa: F401

    Image.MAX_IMAGE_PIXELS = None
    Image.init()
    return {"pillow": PIL.__version__}


def work(header: Header, body: bytearray, room: Room) -> tuple[Header, Sequence[memoryview]]:
    """header: codec, pixels (limit), background RRGGBB. Answers shape [H, W, 3] and the pixels.

    With a `sampling`, the picture is a clip: an animation or a bundle of lossless frames.
    """
    if "sampling" in header:
        from omnifleet_media.decode.animation import decode_animation
        from omnifleet_media.decode.bundle import decode_bundle

        decode = decode_bundle if header["codec"] == BUNDLE else decode_animation
        return decode(header, bytes(body))
    pixels = decode_picture(body, header["codec"], header["pixels"], header["background"])
    return {"shape": list(pixels.shape)}, [pixels.data.cast("B")]


def decode_picture(
    data: bytes | bytearray | memoryview, codec: str, limit: int, background: str = "ffffff"
) -> Pixels:
    """Frame 0 as uint8 RGB (H, W, 3), C-contiguous, as a viewer shows it.

    codec: Pillow's format name, from sniffing. limit: largest width x height, checked on the header alone.
    background: RRGGBB. Raises OmnifleetError: LIMIT_EXCEEDED, INVALID_MEDIA; and what Pillow raises on damaged files.
    """
    with open_picture(io.BytesIO(data), codec, limit) as picture:
        picture.load()
        return canonical(picture, background)


def open_picture(file: io.BytesIO, codec: str, limit: int) -> Image.Image:
    """A picture whose header is read and whose size is within the limit; no pixel is decoded yet."""
    try:
        picture = Image.open(file, formats=[codec])
    except UnidentifiedImageError:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the bytes are not a whole {codec} header") from None
    if picture.width * picture.height > limit:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"the picture is {picture.width} x {picture.height}, at most {limit} pixels are allowed",
            knob="media.limits.pixels",
        )
    return picture


def canonical(picture: Image.Image, background: str) -> Pixels:
    """The pixels of a loaded picture: oriented, over the background RRGGBB, uint8 RGB (H, W, 3), C-contiguous."""
    red, green, blue = bytes.fromhex(background)
    return np.ascontiguousarray(_opaque(_turned(picture), (red, green, blue)))


def _turned(picture: Image.Image) -> Image.Image:
    turn = _TURNS.get(_orientation(picture))
    return picture if turn is None else picture.transpose(turn)


def _orientation(picture: Image.Image) -> int:
    try:
        return int(picture.getexif().get(_ORIENTATION, 1))
    except (OSError, SyntaxError, ValueError, LookupError, TypeError, ArithmeticError):
        return 1  # a broken tag is no tag: viewers show the pixels as they are


def _opaque(picture: Image.Image, background: tuple[int, int, int]) -> Pixels:
    if picture.mode in _SIXTEEN_BIT:
        return _grey_of_sixteen_bits(np.asarray(picture))
    if picture.mode == "F":
        raise OmnifleetError(Reason.INVALID_MEDIA, "pixels are floating point, whose white is not defined")
    if not picture.has_transparency_data:
        return np.asarray(picture if picture.mode == "RGB" else picture.convert("RGB"))
    premultiplied = {"La": "LA", "RGBa": "RGBA"}.get(picture.mode)
    if premultiplied is not None:
        picture = picture.convert(premultiplied)
    return _over(np.asarray(picture.convert("RGBA")), background)


def _grey_of_sixteen_bits(grey: npt.NDArray[np.integer]) -> Pixels:
    """0..65535 to 0..255 by value / 257, to the nearest."""
    low, high = int(grey.min()), int(grey.max())
    if low < 0 or high > 65535:
        raise OmnifleetError(Reason.INVALID_MEDIA, f"grey values {low} to {high} do not fit 16 bits")
    eight = ((grey.astype(np.uint32) + 128) // 257).astype(np.uint8)
    return np.repeat(eight[:, :, None], 3, axis=2)


def _over(rgba: Pixels, background: tuple[int, int, int]) -> Pixels:
    """Source over an opaque background, per channel (c a + b (255 - a)) / 255, to the nearest."""
    alpha = rgba[:, :, 3:].astype(np.uint16)
    paper = np.array(background, np.uint16)
    mixed = rgba[:, :, :3] * alpha + paper * (255 - alpha)
    return ((mixed + 127) // 255).astype(np.uint8)
