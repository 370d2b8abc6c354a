"""Frame manifests on their way in: the files that they name are read, under the allowed folders, and put behind them."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from pathlib import Path

from omnifleet_media.ingest.frame_manifest import MIME, FrameManifest, bundle
from omnifleet_media.ingest.sniff import sniff
from omnifleet_media.ingest.source import Source
from omnifleet_media.server.roots import open_under


async def with_files(source: Source, roots: Sequence[Path], limit: int) -> Source:
    """A frame manifest with the bytes of its frames; any other source as it is.

    limit: most bytes of all files. Raises OmnifleetError: INVALID_MEDIA, INVALID_REQUEST outside the roots,
    LIMIT_EXCEEDED.
    """
    if source.type.mime != MIME:
        return source
    manifest = FrameManifest.parse(source.data)
    data = await asyncio.to_thread(bundle, manifest, lambda path: _read(roots, path, limit), limit)
    return Source(data, sniff(data))


def _read(roots: Sequence[Path], path: str, limit: int) -> bytes:
    """At most one byte more than the limit, which is enough to see that it is too much."""
    with os.fdopen(open_under(roots, path), "rb") as file:
        return file.read(limit + 1)
