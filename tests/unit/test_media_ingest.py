"""What a caller may send, and how early the rest is refused."""

from __future__ import annotations

import base64
import io

import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet_media.ingest.data_url import data_url_payload
from omnifleet_media.ingest.sniff import sniff
from omnifleet_media.ingest.source import Intake


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (1, 1), (255, 0, 0)).save(out, "PNG")
    return out.getvalue()


BODY = base64.b64encode(png()).decode()


@pytest.mark.parametrize(
    "header",
    [
        "data:image/png;base64,",
        "DATA:image/png;BASE64,",
        "data:image/png;charset=utf-8;base64,",
        "data:;base64,",
    ],
)
def test_img_17_legal_data_urls(header: str) -> None:
    assert data_url_payload((header + BODY).encode(), 1000) == png()


@pytest.mark.parametrize(
    "change",
    [
        lambda b: b.rstrip("="),
        lambda b: b.replace("+", "-").replace("/", "_"),
        lambda b: b[:20] + "\n" + b[20:],
        lambda b: b.replace("=", "%3D"),
    ],
)
def test_img_17_usual_spellings_of_base64(change) -> None:  # type: ignore[no-untyped-def]
    assert data_url_payload(f"data:image/png;base64,{change(BODY)}".encode(), 1000) == png()


@pytest.mark.parametrize(
    "url",
    [
        "data:image/png",
        "data:image/png;base64",
        "data:image/png,abc",
        "data:image/png;base64,",
        "data:image/png;base64,%%%%",
    ],
)
def test_img_17_broken_data_urls(url: str) -> None:
    with pytest.raises(OmnifleetError) as caught:
        data_url_payload(url.encode(), 1000)
    assert caught.value.reason is Reason.INVALID_MEDIA


@pytest.mark.parametrize(
    "data", [b"", b"<html><body>", b"<svg xmlns='http://www.w3.org/2000/svg'/>", b"RIFF....NOPE"]
)
def test_img_20_what_is_not_a_picture(data: bytes) -> None:
    with pytest.raises(OmnifleetError) as caught:
        sniff(data)
    assert caught.value.reason is Reason.INVALID_MEDIA


@pytest.mark.parametrize("codec", ["PNG", "JPEG", "GIF", "WEBP", "BMP", "TIFF", "AVIF"])
def test_sniffing_by_bytes(codec: str) -> None:
    out = io.BytesIO()
    Image.new("RGB", (2, 2)).save(out, codec)
    assert sniff(out.getvalue()).codec == codec


@pytest.mark.parametrize(
    ("data", "mime", "kind"),
    [
        (b"\x1aE\xdf\xa3", "video/x-matroska", MediaKind.VIDEO),
        (b"\0\0\0\x18ftypisom\0\0\0\0isommp42", "video/mp4", MediaKind.VIDEO),
        (b"\0\0\0\x14ftypqt  \0\0\0\0qt  ", "video/mp4", MediaKind.VIDEO),
        (b"\0\0\0\x08wide\0\0\0\0mdat", "video/quicktime", MediaKind.VIDEO),
        (b"\0\0\0\x1cftypM4A \0\0\0\0M4A mp42isom", "audio/mp4", MediaKind.AUDIO),
        (b"\0\0\0\x18ftypmif1\0\0\0\0avifmif1", "image/avif", MediaKind.IMAGE),
        (b"RIFF\0\0\0\0AVI LIST", "video/x-msvideo", MediaKind.VIDEO),
        (b"OggS", "video/ogg", MediaKind.VIDEO),
        (b"\x47" + bytes(187) + b"\x47", "video/mp2t", MediaKind.VIDEO),
        (b"\xff\xfb\x90\x64", "audio/mpeg", MediaKind.AUDIO),
        (b"\xff\xf1\x50\x80", "audio/mpeg", MediaKind.AUDIO),
        (b"ID3\x04", "audio/mpeg", MediaKind.AUDIO),
        (b"\xff\xd8\xff\xe0", "image/jpeg", MediaKind.IMAGE),
        (b"fLaC", "audio/flac", MediaKind.AUDIO),
    ],
)
def test_sniffing_of_streams(data: bytes, mime: str, kind: MediaKind) -> None:
    assert (sniff(data).mime, sniff(data).kind) == (mime, kind)


@pytest.mark.parametrize("brand", [b"heic", b"mif1", b"hevc"])
def test_heic_is_refused_in_words(brand: bytes) -> None:
    with pytest.raises(OmnifleetError, match="HEIC") as caught:
        sniff(b"\0\0\0\x18ftyp" + brand + b"\0\0\0\0heicmif1")
    assert caught.value.reason is Reason.UNSUPPORTED


@given(st.binary(max_size=400))
def test_any_bytes_have_a_type_or_a_reason(data: bytes) -> None:
    try:
        assert sniff(data).mime
    except OmnifleetError as error:
        assert error.reason in (Reason.INVALID_MEDIA, Reason.UNSUPPORTED)


def test_an_upload_is_refused_at_the_piece_that_is_too_much() -> None:
    intake = Intake(MediaLimits(source_bytes=10))
    intake.add(b"12345")
    with pytest.raises(OmnifleetError) as caught:
        intake.add(b"678901")
    assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "media.limits.source_bytes")
    assert intake.received == 5


def test_a_data_url_is_measured_by_its_payload() -> None:
    url = f"data:;base64,{BODY}".encode()
    fits, tight = (
        Intake(MediaLimits(source_bytes=len(png()))),
        Intake(MediaLimits(source_bytes=len(png()) - 3)),
    )
    for intake in (fits, tight):
        intake.add(url)
    assert fits.finish().data == png()
    with pytest.raises(OmnifleetError) as caught:
        tight.finish()
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
