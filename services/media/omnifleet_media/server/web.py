"""The HTTP face of the library: uploads, facts, bytes, previews. For people, gym environments and curl."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
from fastapi import APIRouter, Depends, FastAPI, Request, Response
from fastapi.responses import StreamingResponse
from PIL import Image

from omnifleet.auth import Tokens
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.http import make_app
from omnifleet.types import Digest, MediaKind
from omnifleet.wire.server import CHUNK_BYTES
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Kind
from omnifleet_media.server.access import Access
from omnifleet_media.server.door import Door
from omnifleet_media.server.pages import page_routes
from omnifleet_media.server.preview import SIDE, cell_of, contact_sheet, frame_png, sheet_positions, waveform
from omnifleet_media.server.ranges import requested_slice, still_holds
from omnifleet_media.server.rpc import checked, contract_of
from omnifleet_media.server.uploads import received
from omnifleet_media.server.watch import HttpWatch

Drawn = TypeVar("Drawn")

_FOREVER = "private, max-age=31536000, immutable"
_AT_ONCE, _WAITING = 2, 64
_SMALLEST, _LARGEST = 16, 2048


def media_app(door: Door, tokens: Tokens, ready: Callable[[], bool]) -> FastAPI:
    """Uploads and reads under /v1, the page under /; health and metrics without a token."""
    app = make_app("omnifleet media", door.library.counters, ready, docs=False)
    access = Access(tokens)
    app.include_router(_media_routes(door, access))
    app.include_router(_blob_routes(door, access))
    app.include_router(page_routes(door.library, access))
    app.add_middleware(HttpWatch, payload=door.payload)
    return app


# ---------------------------------------------------------------------- media objects


def _media_routes(door: Door, access: Access) -> APIRouter:
    routes = APIRouter(prefix="/v1/media")
    library, drawings = door.library, _Drawings()
    reads = [Depends(access.may("Get"))]

    @routes.put("", dependencies=[Depends(access.may("Put"))])
    @routes.post("", dependencies=[Depends(access.may("Put"))])
    async def upload(request: Request) -> dict[str, Any]:
        source, asked = await received(request, door)
        contract = contract_of(asked.contract, asked.kind, source.type)
        stored, lease = await door.put("http_put", source, contract, asked.options)
        held = {"lease": {"id": lease.id, "expires_unix_ms": lease.expires_unix_ms}} if lease else {}
        return {
            **facts_of(stored.item),
            "source_digest": stored.source,
            "decoded": stored.decoded,
            **held,
        }

    @routes.get("/{digest}", dependencies=[Depends(access.may("Stat"))])
    async def facts(digest: str) -> dict[str, Any]:
        return facts_of(await library.read(checked(digest)))

    @routes.get("/{digest}/preview.png", dependencies=reads)
    async def preview(digest: str, request: Request, side: int = SIDE) -> Response:
        if not _SMALLEST <= side <= _LARGEST:
            raise invalid(f"side {side} is not from {_SMALLEST} to {_LARGEST}")
        item = await library.read(checked(digest))
        if item.kind is MediaKind.AUDIO:
            data = await library.open(Kind.FRAME, item.frames[0])
            return await drawings.png(request, item.digest, lambda: waveform(np.frombuffer(data, "<f4")))
        pixels = await _pixels(door, item, 0)
        return await drawings.png(request, item.frames[0], lambda: frame_png(pixels, side), str(side))

    @routes.get("/{digest}/sheet.png", dependencies=reads)
    async def sheet(digest: str, request: Request) -> Response:
        item = await library.read(checked(digest))
        shown, cells = sheet_positions(len(item.frames)), []
        for i in shown:
            pixels = await _pixels(door, item, i)
            cells.append(await drawings.run(_bound(cell_of, pixels)))
        captions = [_caption(item, i) for i in shown]
        return await drawings.png(request, item.digest, lambda: contact_sheet(cells, captions))

    @routes.get("/{digest}/frames/{i}", dependencies=reads)
    async def frame(digest: str, i: int, request: Request) -> Response:
        item = await library.read(checked(digest))
        pixels = await _pixels(door, item, i)
        door.read("http_get", pixels.nbytes, mapped=False, key="frame")
        return await drawings.png(request, item.frames[i], lambda: frame_png(pixels))

    return routes


async def _pixels(door: Door, item: MediaObject, i: int) -> npt.NDArray[np.uint8]:
    if item.kind is MediaKind.AUDIO:
        raise invalid(f"media://{item.digest} is a track: it has samples, no frames")
    if not 0 <= i < len(item.frames):
        raise OmnifleetError(
            Reason.NOT_FOUND, f"media://{item.digest} has frames 0 to {len(item.frames) - 1}, not {i}"
        )
    data = await door.library.open(Kind.FRAME, item.frames[i])
    return np.frombuffer(data, np.uint8).reshape(item.height, item.width, 3)


def _bound(draw: Callable[[npt.NDArray[np.uint8]], Image.Image], pixels: npt.NDArray[np.uint8]) -> Any:
    return lambda: draw(pixels)


def _caption(item: MediaObject, i: int) -> str:
    return f"{item.timestamps_us[i] / 1_000_000:.2f} s" if item.timestamps_us else f"frame {i}"


def facts_of(item: MediaObject) -> dict[str, Any]:
    """An object as JSON."""
    size = {"width": item.width, "height": item.height}
    if item.kind is MediaKind.AUDIO:
        size = {"samples": item.width, "sample_rate": item.height}
    return {
        "digest": item.digest,
        "url": item.ref.url,
        "kind": str(item.kind),
        **size,
        "frames": list(item.frames),
        "timestamps_s": [us / 1_000_000 for us in item.timestamps_us],
        "bytes": item.bytes,
        "facts": dict(item.facts),
    }


class _Drawings:
    """A few pictures are drawn at once, in threads; more wait, and more than that are sent away."""

    def __init__(self) -> None:
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._waiting = 0

    async def png(
        self, request: Request, name: Digest, draw: Callable[[], bytes], variant: str = ""
    ) -> Response:
        """An answer that never changes, since it is of content; not drawn for who has it already."""
        etag = f'"{name}-{request.url.path.rpartition("/")[2]}{variant}"'
        headers = {"ETag": etag, "Cache-Control": _FOREVER}
        if still_holds(request.headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=headers)
        return Response(await self.run(draw), media_type="image/png", headers=headers)

    async def run(self, draw: Callable[[], Drawn]) -> Drawn:
        """Draw in a thread. Raises OmnifleetError(OVERLOADED)."""
        if self._waiting >= _WAITING:
            raise retryable(
                Reason.OVERLOADED, f"{self._waiting} pictures wait to be drawn", retry_after_ms=500
            )
        self._waiting += 1
        try:
            async with self._room:
                return await asyncio.to_thread(draw)
        finally:
            self._waiting -= 1


# ---------------------------------------------------------------------- stored parts


def _blob_routes(door: Door, access: Access) -> APIRouter:
    routes = APIRouter(prefix="/v1/blobs", dependencies=[Depends(access.may("Get"))])

    @routes.api_route("/{kind}/{digest}", methods=["GET", "HEAD"])
    async def part(kind: str, digest: str, request: Request) -> Response:
        if kind not in Kind.__members__.values():
            raise OmnifleetError(Reason.NOT_FOUND, f"parts are {', '.join(Kind)}, not {kind[:40]!r}")
        data = await door.library.open(Kind(kind), checked(digest))
        etag = f'"{digest}"'
        headers = {
            "ETag": etag,
            "Cache-Control": _FOREVER,
            "Accept-Ranges": "bytes",
            "Content-Disposition": f'attachment; filename="{kind}-{digest[:12]}"',
        }
        if still_holds(request.headers.get("if-none-match", ""), etag):
            return Response(status_code=304, headers=headers)
        asked = request.headers.get("range", "") if request.method == "GET" else ""
        slice_ = requested_slice(asked, request.headers.get("if-range", ""), etag, len(data))
        if slice_.partial:
            headers["Content-Range"] = slice_.content_range
        if not slice_.satisfiable:
            return Response(status_code=416, headers=headers)
        size = slice_.end - slice_.start
        headers["Content-Length"] = str(size)
        body = b"" if request.method == "HEAD" else data[slice_.start : slice_.end]
        if request.method == "GET":
            door.read("http_get", size, mapped=False, key=kind)
            door.library.counters.add("bytes_streamed", size)
        status = 206 if slice_.partial else 200
        return StreamingResponse(
            _pieces(body), status, headers=headers, media_type="application/octet-stream"
        )

    return routes


async def _pieces(data: bytes | memoryview) -> AsyncIterator[bytes]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield bytes(data[start : start + CHUNK_BYTES])
