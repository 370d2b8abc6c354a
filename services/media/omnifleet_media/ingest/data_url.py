"""Data URLs (RFC 2397) in the forms that clients send; only base64 ones, since pictures are bytes."""

from __future__ import annotations

import base64
import binascii
import urllib.parse

from omnifleet.errors import OmnifleetError, Reason

_SCHEME = b"data:"
_HEADER_BYTES = 1024


def is_data_url(data: bytes | bytearray | memoryview) -> bool:
    """True if the bytes start with `data:`, in any case."""
    return bytes(data[: len(_SCHEME)]).lower() == _SCHEME


def data_url_payload(url: bytes | memoryview, limit: int) -> bytes:
    """The bytes inside a data URL; the declared type is ignored, since the bytes decide.

    limit: largest payload in bytes, checked before decoding. Raises OmnifleetError: INVALID_MEDIA for a URL without
    `;base64`, without a comma, empty or with other characters; LIMIT_EXCEEDED.
    """
    header, comma, _ = bytes(url[:_HEADER_BYTES]).partition(b",")
    if not comma:
        raise _broken("has no comma after its header")
    parameters = header[len(_SCHEME) :].lower().split(b";")
    if b"base64" not in [p.strip() for p in parameters[1:]]:
        raise _broken("is not base64 (write data:TYPE;base64,...)")
    body = bytes(url[len(header) + 1 :])
    if len(body) // 4 * 3 > limit + 2:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"the data URL holds about {len(body) // 4 * 3} bytes, at most {limit} are allowed",
            knob="media.limits.source_bytes",
        )
    payload = _decode(body)
    if not payload:
        raise _broken("is empty")
    return payload


def _decode(body: bytes) -> bytes:
    if b"%" in body:
        body = urllib.parse.unquote_to_bytes(body)
    body = b"".join(body.split()).translate(bytes.maketrans(b"-_", b"+/"))
    body += b"=" * (-len(body.rstrip(b"=")) % 4) if not body.endswith(b"=") else b""
    try:
        return base64.b64decode(body, validate=True)
    except binascii.Error as error:
        raise _broken(f"has a bad base64 body: {error}") from error


def _broken(what: str) -> OmnifleetError:
    return OmnifleetError(Reason.INVALID_MEDIA, f"the data URL {what}")
