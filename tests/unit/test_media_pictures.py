"""Canonical pixels. Tests named after field cases keep the fault of that case impossible."""

from __future__ import annotations

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from omnifleet.address import frame_digest
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_media.decode.picture import decode_picture, prepare
from omnifleet_media.ingest.sniff import sniff

LIMIT = 178_956_970
RED, GREEN, BLUE, YELLOW = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0)
WHITE, BLACK = (255, 255, 255), (0, 0, 0)


@pytest.fixture(autouse=True, scope="module")
def _prepared() -> None:
    prepare()


def encoded(picture: Image.Image, codec: str = "PNG", **options: object) -> bytes:
    out = io.BytesIO()
    picture.save(out, codec, **options)
    return out.getvalue()


def decoded(data: bytes, **options: object) -> np.ndarray:
    return decode_picture(data, sniff(data).codec, LIMIT, **options)


def of_rows(*rows: tuple[tuple[int, int, int], ...]) -> np.ndarray:
    return np.array(rows, np.uint8)


def png_claiming(width: int, height: int) -> bytes:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n"
        + chunk(b"IHDR", header)
        + chunk(b"IDAT", zlib.compress(bytes(10)))
        + chunk(b"IEND", b"")
    )


def oriented(tag: int) -> bytes:
    picture = Image.fromarray(of_rows((RED, GREEN, BLUE), (YELLOW, WHITE, BLACK)))
    exif = Image.Exif()
    exif[274] = tag
    return encoded(picture, exif=exif)


def test_img_01_orientation_is_applied() -> None:
    pixels = decoded(oriented(6))
    assert (pixels == of_rows((YELLOW, RED), (WHITE, GREEN), (BLACK, BLUE))).all()


@pytest.mark.parametrize("tag", range(1, 9))
def test_img_01_every_orientation_is_what_pillow_shows(tag: int) -> None:
    from PIL import ImageOps

    data = oriented(tag)
    assert (decoded(data) == np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(data))))).all()


def test_img_03_a_canonical_picture_is_not_turned_again() -> None:
    once = decoded(oriented(6))
    again = decoded(encoded(Image.fromarray(once)))
    assert frame_digest(again) == frame_digest(once)


def test_img_04_alpha_is_over_white() -> None:
    assert decoded(encoded(Image.new("RGBA", (1, 1), (255, 0, 0, 128)))).tolist() == [[[255, 127, 127]]]


def test_hsh_05_background_is_chosen_by_contract() -> None:
    clear = encoded(Image.new("RGBA", (1, 1), (0, 0, 0, 0)))
    assert decoded(clear).tolist() == [[[255, 255, 255]]]
    assert decoded(clear, background="000000").tolist() == [[[0, 0, 0]]]


def test_img_06_sixteen_bit_grey_is_scaled() -> None:
    grey = np.array([[0, 257, 32896, 65535]], np.uint16)
    assert decoded(encoded(Image.fromarray(grey))).tolist() == [[[v] * 3 for v in (0, 1, 128, 255)]]


def test_img_08_animation_is_its_first_frame() -> None:
    frames = [Image.new("RGB", (2, 2), colour) for colour in (RED, GREEN, BLUE)]
    gif = encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], duration=[100, 300, 100])
    assert {frame_digest(decoded(gif)) for _ in range(5)} == {frame_digest(decoded(encoded(frames[0])))}


def test_img_10_a_truncated_picture_is_refused() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = encoded(Image.fromarray(noise), "JPEG", quality=90)
    with pytest.raises(OSError, match="truncated"):
        decoded(whole[: len(whole) * 6 // 10])
    assert decoded(whole).shape == (64, 64, 3)


@pytest.mark.parametrize(
    ("size", "passes"), [((20000, 20000), False), ((16384, 10923), False), ((16384, 10922), True)]
)
def test_img_12_size_is_checked_on_the_header(size: tuple[int, int], passes: bool) -> None:
    data = png_claiming(*size)
    expected = OSError if passes else OmnifleetError  # within the limit, the missing pixels are the fault
    with pytest.raises(expected) as caught:
        decode_picture(data, "PNG", LIMIT)
    assert passes or (caught.value.reason, caught.value.knob) == (
        Reason.LIMIT_EXCEEDED,
        "media.limits.pixels",
    )


@pytest.mark.parametrize("mode", ["1", "L", "P", "LA", "I;16", "RGB", "RGBA"])
def test_img_19_every_mode_is_rgb(mode: str) -> None:
    picture = Image.fromarray(np.full((2, 2), 7, np.uint16)) if mode == "I;16" else Image.new(mode, (2, 2))
    pixels = decoded(encoded(picture))
    assert (pixels.shape, pixels.dtype) == ((2, 2, 3), np.uint8)


@pytest.mark.parametrize("mode", ["L", "CMYK"])
def test_img_19_jpeg_modes_are_rgb(mode: str) -> None:
    assert decoded(encoded(Image.new(mode, (2, 2)), "JPEG")).shape == (2, 2, 3)


def test_cmyk_white_is_white() -> None:
    assert (decoded(encoded(Image.new("CMYK", (8, 8), (0, 0, 0, 0)), "JPEG", quality=95)) >= 254).all()


def test_transparent_palette_entry_is_over_white() -> None:
    picture = Image.new("P", (2, 1))
    picture.putpalette([255, 0, 0, 0, 0, 255])
    picture.putpixel((1, 0), 1)
    assert decoded(encoded(picture, transparency=1)).tolist() == [[list(RED), list(WHITE)]]


def test_transparent_colour_of_rgb_is_over_white() -> None:
    assert decoded(encoded(Image.new("RGB", (1, 1), BLUE), transparency=BLUE)).tolist() == [[list(WHITE)]]


def test_float_pixels_are_refused() -> None:
    with pytest.raises(OmnifleetError, match="floating point"):
        decoded(encoded(Image.new("F", (1, 1), 0.5), "TIFF"))


def test_img_20_bytes_after_the_picture_do_not_matter() -> None:
    png = encoded(Image.new("RGB", (1, 1), RED))
    assert decoded(png + bytes(1 << 20)).tolist() == [[list(RED)]]


def test_sixteen_bit_colour_keeps_its_high_byte() -> None:
    def chunk(kind: bytes, body: bytes) -> bytes:
        return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))

    row = b"\0" + struct.pack(">6H", 0, 255, 256, 32_896, 65_279, 65_535)
    png = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", 2, 1, 16, 2, 0, 0, 0))
    png += chunk(b"IDAT", zlib.compress(row)) + chunk(b"IEND", b"")
    assert decoded(png).tolist() == [[[0, 0, 1], [128, 254, 255]]]


def test_a_picture_of_two_sixteen_bit_bytes_orders_is_one_picture() -> None:
    grey = np.array([[0, 257, 32_896, 65_535]], np.uint16)
    little, big = (encoded(Image.fromarray(grey.astype(order)), "TIFF") for order in ("<u2", ">u2"))
    assert little != big
    assert (decoded(little) == decoded(big)).all()


def test_a_broken_orientation_is_none() -> None:
    pixels = of_rows((RED, GREEN, BLUE))
    exif = Image.Exif()
    exif[274] = 9
    assert (decoded(encoded(Image.fromarray(pixels), exif=exif)) == pixels).all()


@pytest.mark.parametrize("codec", ["JPEG", "WEBP", "TIFF"])
def test_img_01_orientation_is_applied_in_every_format(codec: str) -> None:
    exif = Image.Exif()
    exif[274] = 6
    options = {"lossless": True} if codec == "WEBP" else {}
    wide = Image.new("RGB", (32, 16), RED)
    assert decoded(encoded(wide, codec, exif=exif, **options)).shape == (32, 16, 3)


@pytest.mark.parametrize("keep", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("codec", ["PNG", "JPEG", "GIF", "WEBP", "TIFF", "BMP"])
def test_img_10_no_format_is_shown_half(codec: str, keep: float) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = encoded(Image.fromarray(noise), codec)
    with pytest.raises(
        (OmnifleetError, OSError, SyntaxError, ValueError, EOFError, struct.error, IndexError)
    ):
        decoded(whole[: int(len(whole) * keep)])


def test_hsh_01_size_is_part_of_the_address() -> None:
    data = np.array([1, 2, 3, 4, 5, 6], np.uint8)
    wide, high = (decoded(encoded(Image.fromarray(data.reshape(shape)))) for shape in ((1, 2, 3), (2, 1, 3)))
    assert frame_digest(wide) != frame_digest(high)
    assert (wide.shape, high.shape) == ((1, 2, 3), (2, 1, 3))
