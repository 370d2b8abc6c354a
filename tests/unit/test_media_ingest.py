"""What a caller may send, and how early the rest is refused."""

from __future__ import annotations

import base64
import io

import pytest
from PIL import Image

from omnifleet.config.services import MediaLimits
from omnifleet.errors import OmnifleetError, Reason
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
