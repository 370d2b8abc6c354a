"""The life of a media service: open the rooms, listen, serve until stopped, close everything."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from omnifleet.auth import Tokens
from omnifleet.config.services import MediaConfig
from omnifleet.http import http_serving
from omnifleet.telemetry.counters import Counters
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.wire.counting import CountMessages
from omnifleet.wire.media_pb2_grpc import add_MediaServicer_to_server
from omnifleet.wire.server import serving
from omnifleet_media.decode.request import Decoder
from omnifleet_media.index.port import Kind
from omnifleet_media.sandbox.pool import ProcessPool
from omnifleet_media.server.door import Door, add_rates
from omnifleet_media.server.fetch import Fetcher
from omnifleet_media.server.library import Library
from omnifleet_media.server.opening import opened_index, opened_store
from omnifleet_media.server.quotas import Quotas
from omnifleet_media.server.retention import Retention, now_ms
from omnifleet_media.server.rpc import MediaRpc
from omnifleet_media.server.web import media_app

log = logging.getLogger("omnifleet.media")

_SEGMENT_S = 60.0
_SEGMENT_BYTES = 2 << 30
_COUNTERS = (
    "puts",
    "decodes",
    "alias_hits",
    "bytes_received",
    "bytes_fetched",
    "reads",
    "segment_hits",
    "segments_computed",
    "segments_served",
    "shm_maps",
    "bytes_streamed",
    "evictions",
)


@dataclass(frozen=True, slots=True)
class Running:
    """A service that listens. Addresses are "host:port"."""

    grpc: str
    http: str
    library: Library
    door: Door


@asynccontextmanager
async def media_service(config: MediaConfig, folder: Path, tokens: Tokens) -> AsyncIterator[Running]:
    """Serve from `folder` (unless `config.store` says otherwise) inside this block.

    Raises OmnifleetError: PORT_TAKEN, INVALID_CONFIG; UNAVAILABLE if the index does not answer.
    """
    counters = Counters("media")
    for name in _COUNTERS:
        counters.add(name, 0)
    async with AsyncExitStack() as stack:
        root = config.store or folder / "media"
        store = await stack.enter_async_context(opened_store(config, root))
        index = await stack.enter_async_context(opened_index(config, root))
        quotas = Quotas(config, index, lambda source: store.disk.size(Kind.SOURCE, source))
        retention = Retention(
            store,
            index,
            config.disk_bytes,
            counters,
            admit=lambda run, digests: quotas.admit(run, digests, now_ms()),
        )
        library = Library(
            config,
            store,
            index,
            retention,
            Decoder(config.limits, config.decoders),
            _processors(config),
            counters,
        )
        stack.push_async_callback(library.close)
        _add_gauges(library)
        payload = PayloadMeter("media")
        counters.expose(payload)
        door = Door(library, Fetcher(config.sources, config.limits), payload)
        add_rates(library, payload)
        rpc = MediaRpc(door)
        for work in (library.warm(), library.recovery.keep(), retention.keep_notes()):
            task = asyncio.create_task(work)
            stack.push_async_callback(_stop, task)
        app = media_app(door, tokens, lambda: rpc.state == "serving")
        http = await stack.enter_async_context(
            http_serving(app, config.http_listen, knob="media.http_listen")
        )
        grpc = await stack.enter_async_context(
            serving(
                config.listen,
                lambda server: add_MediaServicer_to_server(rpc, server),  # type: ignore[no-untyped-call]
                tokens=tokens,
                knob="media.listen",
                interceptors=(CountMessages(payload),),
            )
        )
        rpc.state = "serving"
        try:
            yield Running(grpc, http, library, door)
        finally:
            rpc.state = "draining"


def _processors(config: MediaConfig) -> ProcessPool:
    return ProcessPool(
        "segments",
        1,
        work_s=_SEGMENT_S,
        memory_bytes=config.limits.decode_memory_bytes,
        reply_bytes=_SEGMENT_BYTES,
        time_knob="",
    )


def _add_gauges(library: Library) -> None:
    gauge = library.counters.gauge
    gauge("leases_active", lambda: library.retention.leases_active)
    gauge("disk_bytes_used", lambda: library.store.disk.used)
    gauge("shared_memory_bytes_used", lambda: library.store.shared.used)
    gauge("shared_memory_refused", lambda: library.store.shared.refused)


async def _stop(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
