"""What the gRPC and the HTTP face share: how sources come in, and what is counted when content goes in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from omnifleet.errors import Reason, retryable
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.types import Lease, MediaKind
from omnifleet_media.address.contract import DecodeContract
from omnifleet_media.index.port import SegmentRecord
from omnifleet_media.ingest.source import Intake, Source
from omnifleet_media.server.cached_frames import with_files
from omnifleet_media.server.fetch import Fetcher, check_declared
from omnifleet_media.server.library import Library, Stored

PUTS = ("media_put", "media_putmany", "media_decode", "http_put")
"""Boundaries at which objects come in."""


@dataclass(frozen=True, slots=True)
class PutOptions:
    """What a caller may ask of a put besides the contract. With `lease_owner`, the object is leased at once."""

    run: str = ""
    durable: bool = False
    lease_owner: str = ""
    lease_ttl_ms: int = 0


class Upload:
    """One source on its way in; what it holds counts against `media.limits.uploads_bytes`."""

    def __init__(self, door: Door, intake: Intake) -> None:
        self._door, self.intake = door, intake
        self.reserved = 0

    def add(self, piece: bytes) -> None:
        """Take the next piece. Raises OmnifleetError: LIMIT_EXCEEDED, OVERLOADED."""
        self._door.reserve(len(piece))
        self.reserved += len(piece)
        self.intake.add(piece)

    @property
    def received(self) -> int:
        """Bytes so far."""
        return self.intake.received


class Door:
    """Sources in and content out, under limits and counted."""

    def __init__(self, library: Library, fetcher: Fetcher, payload: PayloadMeter) -> None:
        self.library, self.payload = library, payload
        self._fetcher = fetcher
        self._roots = library.config.sources.roots
        self._reserved = 0

    @property
    def reserved(self) -> int:
        """Bytes of sources that are in memory now."""
        return self._reserved

    def reserve(self, size: int) -> None:
        """Room for more bytes of uploads. Raises OmnifleetError(OVERLOADED)."""
        limit = self.library.config.limits.uploads_bytes
        if self._reserved + size > limit:
            raise retryable(
                Reason.OVERLOADED,
                f"uploads hold {self._reserved} of {limit} bytes already",
                knob="media.limits.uploads_bytes",
                retry_after_ms=200,
            )
        self._reserved += size

    @contextmanager
    def upload(self, declared: int = 0) -> Iterator[Upload]:
        """An upload that may take pieces inside the block. declared: its size, 0 if unknown; refused if too large."""
        limits = self.library.config.limits
        check_declared(declared, limits)
        upload = Upload(self, Intake(limits))
        try:
            yield upload
        finally:
            self._reserved -= upload.reserved

    async def finish(self, upload: Upload, url: str = "") -> Source:
        """What was sent, or what `url` names. Raises OmnifleetError: see `Fetcher.fetch`."""
        if url:
            await self._fetcher.fetch(url, upload)
            self.library.counters.add("bytes_fetched", upload.received)
        source = await with_files(
            upload.intake.finish(), self._roots, self.library.config.limits.source_bytes
        )
        extra = len(source.data) - upload.received
        if extra > 0:  # the files of a frame manifest
            self.reserve(extra)
            upload.reserved += extra
        return source

    async def put(
        self, boundary: str, source: Source, contract: DecodeContract, options: PutOptions
    ) -> tuple[Stored, Lease | None]:
        """Store, lease if asked to, and count."""
        lease: Lease | None = None
        if options.lease_owner:
            stored, lease = await self.library.put_leased(
                source,
                contract,
                options.run,
                options.lease_owner,
                options.lease_ttl_ms,
                durable=options.durable,
            )
        else:
            stored = await self.library.put(source, contract, durable=options.durable)
        self.stored(boundary, stored)
        return stored, lease

    # ------------------------------------------------------------------ counting

    def stored(self, boundary: str, stored: Stored) -> None:
        """A put: logical is every frame of the object, physical the frames that were new here."""
        item = stored.item
        self.payload.moved(
            boundary,
            logical_bytes=item.frame_bytes * len(item.frames),
            physical_bytes=stored.new_bytes,
            logical_segments=len(item.frames),
            physical_segments=stored.new_frames,
            key="track" if item.kind is MediaKind.AUDIO else "frame",
        )

    def read(self, boundary: str, size: int, *, mapped: bool, key: str) -> None:
        """A read of `size` bytes of a kind of content: physical is what was copied for it."""
        self.library.counters.add("reads")
        self.payload.moved(
            boundary,
            logical_bytes=size,
            physical_bytes=0 if mapped else size,
            physical_segments=0 if mapped else 1,
            key=key,
        )

    def segment(self, boundary: str, record: SegmentRecord, *, made: bool) -> None:
        """A segment handed out: physical if it was made for this call."""
        self.library.counters.add("reads")
        self.library.counters.add("segment_hits", int(not made))
        self.payload.moved(
            boundary,
            logical_bytes=record.bytes,
            physical_bytes=record.bytes if made else 0,
            physical_segments=int(made),
            key="segment",
        )


def add_rates(library: Library, payload: PayloadMeter) -> None:
    """Gauges that put counters in proportion: shares from 0 to 1, and logical bytes put a physical one."""
    counters = library.counters

    def share(part: str, whole: str) -> float:
        return counters.count(part) / counters.count(whole) if counters.count(whole) else 0.0

    def dedup() -> float:
        at = payload.snapshot()
        logical, physical = (
            sum(at.get(f"payload_bytes/{b}/{kind}_media", 0) for b in PUTS)
            for kind in ("logical", "physical")
        )
        return logical / physical if physical else 1.0

    counters.gauge("alias_hit_rate", lambda: share("alias_hits", "puts"))
    counters.gauge("map_rate", lambda: share("shm_maps", "reads"))
    counters.gauge("segment_hit_rate", lambda: share("segment_hits", "segments_served"))
    counters.gauge("dedup_ratio", dedup)
