"""Pictures of a run's media: asked of the media service, kept beside the report for when it is down."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import httpx

_SIDE = 256
_DEADLINE_S = 20.0


def fetch_pictures(folder: Path, digests: Iterable[str], *, http: str, secret: str) -> dict[str, bytes]:
    """PNG of each digest that the service at `http` ("host:port") still has, kept in `folder`.

    A picture is itself, a clip its contact sheet, a sound its waveform. What `folder` has is not asked again; "" for
    `http` asks nobody.
    """
    wanted = {digest: folder / f"{digest}.png" for digest in digests}
    found = {digest: kept.read_bytes() for digest, kept in wanted.items() if kept.exists()}
    missing = wanted.keys() - found.keys()
    if not http or not missing:
        return found
    folder.mkdir(parents=True, exist_ok=True)
    headers = {"authorization": f"Bearer {secret}"}
    with httpx.Client(
        base_url=f"http://{http}", headers=headers, timeout=_DEADLINE_S, trust_env=False
    ) as media:
        for digest in missing:
            png = _picture(media, digest)
            if png is not None:
                wanted[digest].write_bytes(png)
                found[digest] = png
    return found


def _picture(media: httpx.Client, digest: str) -> bytes | None:
    """None if the service is gone, or no longer has the medium."""
    try:
        facts = media.get(f"/v1/media/{digest}")
        if facts.status_code != httpx.codes.OK:
            return None
        face = "sheet.png" if facts.json()["kind"] == "video" else f"preview.png?side={_SIDE}"
        drawn = media.get(f"/v1/media/{digest}/{face}")
    except httpx.TransportError:
        return None
    return drawn.content if drawn.status_code == httpx.codes.OK else None
