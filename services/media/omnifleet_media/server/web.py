"""The HTTP face of the library: uploads, facts, previews. For people, gym environments and curl."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Callable
from typing import Any

import numpy as np
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from PIL import Image

from omnifleet.auth import Tokens
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.http import make_app
from omnifleet.types import Digest
from omnifleet.wire import common_pb2, media_pb2
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Kind
from omnifleet_media.ingest.source import Intake
from omnifleet_media.server.library import Library
from omnifleet_media.server.rpc import checked, contract_of

_PREVIEW_SIDE = 512
_FORM_OVERHEAD = 64 << 10


def media_app(library: Library, tokens: Tokens, ready: Callable[[], bool]) -> FastAPI:
    """POST or PUT /v1/media; GET /v1/media/DIGEST, .../preview.png, .../frames/I; health and metrics."""
    app = make_app("omnifleet media", library.counters, ready)
    routes = APIRouter(prefix="/v1/media", dependencies=[Depends(_bearer(tokens))])

    @routes.put("")
    @routes.post("")
    async def upload(request: Request) -> dict[str, Any]:
        source = (await _received(request, library)).finish()
        contract = contract_of(media_pb2.DecodeContract(), common_pb2.MEDIA_KIND_IMAGE, source.type)
        stored = await library.put(source, contract, durable=request.query_params.get("durable") == "true")
        return {**_facts(stored.item), "source_digest": stored.source, "decoded": stored.decoded}

    @routes.get("/{digest}")
    async def facts(digest: str) -> dict[str, Any]:
        return _facts(await library.read(checked(digest)))

    @routes.get("/{digest}/preview.png")
    async def preview(digest: str) -> Response:
        return await _png(library, checked(digest), 0, _PREVIEW_SIDE)

    @routes.get("/{digest}/frames/{i}")
    async def frame(digest: str, i: int) -> Response:
        return await _png(library, checked(digest), i, None)

    app.include_router(routes)
    return app


def _bearer(tokens: Tokens) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        secret = request.headers.get("authorization", "").removeprefix("Bearer ")
        if tokens.by_scope and tokens.scope_of(secret) is None:
            raise OmnifleetError(
                Reason.UNAUTHENTICATED, "no valid bearer token", knob="OMNIFLEET_TOKENS (tokens file)"
            )

    return check


async def _received(request: Request, library: Library) -> Intake:
    """The body, raw or the `file` part of a form; refused as soon as it is too large."""
    intake = Intake(library.config.limits)
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        async for piece in request.stream():
            library.counters.add("bytes_received", len(piece))
            intake.add(piece)
        return intake
    form = await _limited(request, library).form(max_files=1, max_fields=8)
    part = form.get("file")
    if part is None or isinstance(part, str):
        raise invalid("a form upload has its picture in the part named `file`")
    try:
        intake.add(await part.read())
    finally:
        await form.close()
    library.counters.add("bytes_received", intake.received)
    return intake


def _limited(request: Request, library: Library) -> Request:
    """The same request, whose body ends in LIMIT_EXCEEDED when it outgrows an upload."""
    limit = library.config.limits.source_bytes // 3 * 4 + _FORM_OVERHEAD
    received = 0

    async def receive() -> Any:
        nonlocal received
        message = await request.receive()
        received += len(message.get("body", b""))
        if received > limit:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the form is larger than {limit} bytes",
                knob="media.limits.source_bytes",
            )
        return message

    return Request(request.scope, receive)


async def _png(library: Library, digest: Digest, i: int, side: int | None) -> Response:
    item = await library.read(digest)
    if not 0 <= i < len(item.frames):
        raise OmnifleetError(
            Reason.NOT_FOUND, f"media://{digest} has frames 0 to {len(item.frames) - 1}, not {i}"
        )
    data = await library.open(Kind.FRAME, item.frames[i])
    body = await asyncio.to_thread(_encode, data, item, side)
    library.counters.add("bytes_streamed", len(body))
    headers = {"ETag": f'"{item.frames[i]}"', "Cache-Control": "private, max-age=31536000, immutable"}
    return Response(body, media_type="image/png", headers=headers)


def _encode(data: memoryview, item: MediaObject, side: int | None) -> bytes:
    picture = Image.fromarray(np.frombuffer(data, np.uint8).reshape(item.height, item.width, 3))
    if side is not None:
        picture.thumbnail((side, side))
    out = io.BytesIO()
    picture.save(out, "PNG", compress_level=1)
    return out.getvalue()


def _facts(item: MediaObject) -> dict[str, Any]:
    return {
        "digest": item.digest,
        "url": item.ref.url,
        "kind": str(item.kind),
        "width": item.width,
        "height": item.height,
        "frames": list(item.frames),
        "timestamps_s": [us / 1_000_000 for us in item.timestamps_us],
        "bytes": item.bytes,
        "facts": dict(item.facts),
    }
