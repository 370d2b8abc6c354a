"""HTTP uploads: a raw body, a form, or JSON that names a URL; refused as soon as they are too large."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.wire.server import CHUNK_BYTES
from omnifleet_media.ingest.source import Source
from omnifleet_media.server.asked import Asked, asked_by_json, asked_by_query
from omnifleet_media.server.door import Door

_FORM_OVERHEAD = 64 << 10
_JSON_BYTES = 1 << 20  # a URL and options, or a small data URL


async def received(request: Request, door: Door) -> tuple[Source, Asked]:
    """The body (raw, the `file` part of a form, or what a JSON body names); refused as soon as it is too large."""
    try:
        return await _received(request, door)
    except ClientDisconnect:
        raise invalid("the upload broke off") from None  # nobody hears it, and nothing is stored


async def _received(request: Request, door: Door) -> tuple[Source, Asked]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind == "application/json":
        asked = asked_by_json(_parsed(await _limited(request, _JSON_BYTES, "the body").body()))
        with door.upload() as upload:
            return await door.finish(upload, asked.url), asked
    asked = asked_by_query(request.query_params.multi_items())
    with door.upload(_declared(request)) as upload:
        async for piece in _form_file(request, door) if kind == "multipart/form-data" else request.stream():
            door.library.counters.add("bytes_received", len(piece))
            upload.add(piece)
        return await door.finish(upload), asked


def _declared(request: Request) -> int:
    """What the body says its size is; a data URL is measured when it is unwrapped, so a third more may pass."""
    size = request.headers.get("content-length", "")
    return int(size) * 3 // 4 if size.isdecimal() and len(size) < 20 else 0


async def _form_file(request: Request, door: Door) -> AsyncIterator[bytes]:
    """The part named `file`; large ones wait in a scratch file, not in memory."""
    limit = door.library.config.limits.source_bytes // 3 * 4 + _FORM_OVERHEAD
    form = await _limited(request, limit, "the form").form(max_files=1, max_fields=8)
    try:
        part = form.get("file")
        if part is None or isinstance(part, str):
            raise invalid("a form upload has its picture in the part named `file`")
        while piece := await part.read(CHUNK_BYTES):
            yield piece
    finally:
        await form.close()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not JSON: {error}") from None


def _limited(request: Request, limit: int, what: str) -> Request:
    """The same request, whose body ends in LIMIT_EXCEEDED when it outgrows `limit` bytes."""
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"{what} is larger than {limit} bytes; a source is sent best as a raw body",
                knob="media.limits.source_bytes",
            )
        return message

    return Request(request.scope, receive)
