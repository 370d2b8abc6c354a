"""Can the clips and sounds of rows be decoded? Asked of the media service itself, each source once."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError
from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet_trainer.data.children import service
from omnifleet_trainer.data.gym_rows import Parts, clips_of, file_url

_CLIPS = media_pb2.DecodeContract(sampling="uniform@1", num_frames=16)
TryMedia = Callable[[Parts], Awaitable[None]]


@asynccontextmanager
async def decoding(roots: Sequence[Path], *, wanted: bool) -> AsyncIterator[TryMedia]:
    """A coroutine function that decodes a row's media and raises what the service says; one that does nothing unless `wanted`.

    roots: what the service may read; none = everything.
    """
    if not wanted:

        async def nothing(parts: Parts) -> None:
            return

        yield nothing
        return
    allowed = json.dumps([str(root.resolve()) for root in roots] or ["/"])
    async with service("media", [f"media.sources.roots={allowed}"]) as (address, secret):
        async with MediaClient.open(address, secret, name="data-check") as media:
            known: dict[str, OmnifleetError | None] = {}

            async def decode(parts: Parts) -> None:
                sources = [(url, MediaKind.VIDEO) for url in clips_of(parts)]
                sources += [
                    (file_url(url), kind)
                    for kind in (MediaKind.IMAGE, MediaKind.AUDIO)
                    for url in parts.media[kind]
                ]
                for url, kind in sources:
                    if url not in known:
                        known[url] = await _fault(media, url, kind)
                    if (error := known[url]) is not None:
                        raise error

            yield decode


async def _fault(media: MediaClient, url: str, kind: MediaKind) -> OmnifleetError | None:
    contract = _CLIPS if kind is MediaKind.VIDEO else None
    try:
        if url.startswith("data:"):
            await media.put(url.encode(), "data-check", kind=kind, contract=contract)
        else:
            await media.put_url(url, "data-check", kind=kind, contract=contract)
    except OmnifleetError as error:
        if error.retryable:
            raise
        return error
    return None
