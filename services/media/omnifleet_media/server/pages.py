"""The browsable page: what is stored, most recently used first. Plain HTML; no script, nothing inline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse, RedirectResponse, Response
from jinja2 import Environment, PackageLoader, StrictUndefined

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaKind
from omnifleet.wire.errors import HTTP_STATUS
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.server.access import Access
from omnifleet_media.server.blobs import frame_blob
from omnifleet_media.server.library import Library
from omnifleet_media.server.retention import now_ms
from omnifleet_media.server.rpc import checked

_SHOWN = 120
_FRAMES = 256
_PAGES = Environment(
    loader=PackageLoader("omnifleet_media.server", "page"), autoescape=True, undefined=StrictUndefined
)
_CSS = PackageLoader("omnifleet_media.server", "page").get_source(_PAGES, "page.css")[0]


@dataclass(frozen=True, slots=True)
class _Frame:
    digest: str
    time: str


@dataclass(frozen=True, slots=True)
class _Item:
    digest: str
    what: str
    size: str
    clip: bool
    frames: list[_Frame]


def page_routes(library: Library, access: Access) -> APIRouter:
    """`/`, `/media/DIGEST`, `/find`, `/login` and the style sheet."""
    routes = APIRouter(include_in_schema=False)

    @routes.get("/")
    async def front(request: Request) -> Response:
        return await _shown(access, "Status", request, lambda: _list(library))

    @routes.get("/media/{digest}")
    async def detail(digest: str, request: Request) -> Response:
        return await _shown(access, "Stat", request, lambda: _object(library, digest))

    @routes.get("/find")
    async def find(digest: str = "") -> Response:
        wanted = digest.strip().removeprefix("media://")
        hexadecimal = wanted.isascii() and wanted.isalnum()
        return RedirectResponse(f"/media/{wanted}" if hexadecimal else "/", status_code=303)

    @routes.get("/login")
    async def login(request: Request, ticket: str = "") -> Response:
        try:
            return access.log_in(ticket, secure=request.url.scheme == "https")
        except OmnifleetError as error:
            return _refused(error)

    @routes.get("/page.css")
    async def style() -> Response:
        return Response(_CSS, media_type="text/css", headers={"Cache-Control": "max-age=3600"})

    return routes


async def _shown(access: Access, method: str, request: Request, draw: Any) -> Response:
    """A page for who may see it; refusals are pages too."""
    try:
        access.may(method)(request)
        return HTMLResponse(await draw(), headers={"Cache-Control": "no-store"})
    except OmnifleetError as error:
        return _refused(error)


async def _list(library: Library) -> str:
    digests = await library.index.recent(_SHOWN)
    items = [item for item in [await library.index.read_object(d) for d in digests] if item is not None]
    known = await library.index.count_objects()
    counters = library.counters.snapshot()
    numbers = [
        ("objects", f"{known:,}"),
        ("on disk", _size(library.store.disk.used)),
        ("in shared memory", _size(library.store.shared.used)),
        ("uploads known", f"{counters['alias_hit_rate']:.0%}" if counters["puts"] else "–"),
        ("reads by mapping", f"{counters['map_rate']:.0%}" if counters["reads"] else "–"),
        ("deduplication", f"{counters['dedup_ratio']:.2f}×"),
        ("leases", f"{counters['leases_active']:,.0f}"),
    ]
    more = known if known > len(items) else 0
    return _PAGES.get_template("list.html").render(
        items=[_item(i) for i in items], numbers=numbers, more=more
    )


async def _object(library: Library, digest: str) -> str:
    item = await library.read(checked(digest))
    tiers = await library.tiers(frame_blob(item.frames[0], item.height, item.width)) if item.frames else []
    shown = _item(item)
    rows = [
        ("kind", shown.what),
        ("size", shown.size),
        ("canonical bytes", f"{item.bytes:,}"),
        ("leases", await library.index.count_leases(item.digest, now_ms())),
        ("where", ", ".join(tiers) or "nowhere: upload it again"),
        *((name.replace("_", " "), value) for name, value in sorted(item.facts.items())),
    ]
    if len(item.frames) > _FRAMES:
        rows.append(("frames listed", f"the first {_FRAMES} of {len(item.frames)}"))
    return _PAGES.get_template("object.html").render(item=shown, rows=rows)


def _item(item: MediaObject) -> _Item:
    if item.kind is MediaKind.AUDIO:
        seconds = item.width / max(item.height, 1)
        return _Item(item.digest, "track", f"{seconds:.1f} s at {item.height:,} Hz", False, [])
    times = [f"{us / 1_000_000:.3f} s" for us in item.timestamps_us] or [""] * len(item.frames)
    frames = [_Frame(d, time) for d, time in zip(item.frames, times, strict=True)][:_FRAMES]
    clip = item.kind is MediaKind.VIDEO
    what = f"clip of {len(item.frames)} frames" if clip else "picture"
    return _Item(item.digest, what, f"{item.width}×{item.height}", clip, frames)


def _refused(error: OmnifleetError) -> Response:
    title = "Not logged in" if error.reason is Reason.UNAUTHENTICATED else str(error.reason).replace("_", " ")
    body = _PAGES.get_template("refused.html").render(title=title, message=error.message)
    return HTMLResponse(
        body, status_code=HTTP_STATUS.get(error.reason, 503), headers={"Cache-Control": "no-store"}
    )


def _size(count: float) -> str:
    for unit in ("B", "KB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
