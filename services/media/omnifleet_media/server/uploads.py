"""HTTP uploads: a raw body, a form, or JSON that names a URL; refused as soon as they are too large."""

from __future__ import annotations

import json
from typing import Any

from fastapi import Request
from starlette.requests import ClientDisconnect

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_media.ingest.source import Source
from omnifleet_media.server.asked import Asked, asked_by_json, asked_by_query
from omnifleet_media.server.door import Door

_FORM_OVERHEAD = 64 << 10


async def received(request: Request, door: Door) -> tuple[Source, Asked]:
    """The body (raw, the `file` part of a form, or what a JSON body names); refused as soon as it is too large."""
    try:
        return await _received(request, door)
    except ClientDisconnect:
        raise invalid("the upload broke off") from None  # nobody hears it, and nothing is stored


async def _received(request: Request, door: Door) -> tuple[Source, Asked]:
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    limited = _limited(request, door)
    if kind == "application/json":
        asked = asked_by_json(_parsed(await limited.body()))
        with door.upload() as upload:
            return await door.finish(upload, asked.url), asked
    asked = asked_by_query(request.query_params.multi_items())
    if kind == "multipart/form-data":
        with door.upload() as upload:
            upload.add(await _form_file(limited))
            door.library.counters.add("bytes_received", upload.received)
            return await door.finish(upload), asked
    with door.upload(_declared(request)) as upload:
        async for piece in request.stream():
            door.library.counters.add("bytes_received", len(piece))
            upload.add(piece)
        return await door.finish(upload), asked


def _declared(request: Request) -> int:
    """What the body says its size is; a data URL is measured when it is unwrapped, so a third more may pass."""
    size = request.headers.get("content-length", "")
    return int(size) * 3 // 4 if size.isdecimal() else 0


async def _form_file(request: Request) -> bytes:
    form = await request.form(max_files=1, max_fields=8)
    try:
        part = form.get("file")
        if part is None or isinstance(part, str):
            raise invalid("a form upload has its picture in the part named `file`")
        return await part.read()
    finally:
        await form.close()


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError as error:
        raise invalid(f"the body is not JSON: {error}") from None


def _limited(request: Request, door: Door) -> Request:
    """The same request, whose body ends in LIMIT_EXCEEDED when it outgrows an upload."""
    limit = door.library.config.limits.source_bytes // 3 * 4 + _FORM_OVERHEAD
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the body is larger than {limit} bytes",
                knob="media.limits.source_bytes",
            )
        return message

    return Request(request.scope, receive)
