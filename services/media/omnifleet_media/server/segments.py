"""Model-ready segments of what is on the shelf: each made once, however many ask."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping

from omnifleet.address import digest_bytes, processor_fingerprint, segment_key
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.flight import SingleFlight
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import Kind, SegmentRecord, Unit
from omnifleet_media.sandbox.pool import ProcessPool
from omnifleet_media.segment.work import kind_of
from omnifleet_media.segment.work import library as segment_library
from omnifleet_media.server.blobs import record_blob, segment_blob
from omnifleet_media.server.flights import Flights
from omnifleet_media.server.retention import now_ms
from omnifleet_media.server.shelf import Shelf

_CONFIG_BYTES = 64 << 10
_SAMPLING = {MediaKind.IMAGE: "still", MediaKind.VIDEO: "sampled", MediaKind.AUDIO: "track"}


class Segments:
    """Tensors by medium and processor; processors run in processes."""

    def __init__(self, shelf: Shelf, processors: ProcessPool, flights: Flights) -> None:
        self._shelf, self._processors, self._flights = shelf, processors, flights
        self._made: SingleFlight[Digest, tuple[SegmentRecord, bool]] = SingleFlight()

    async def warm(self) -> None:
        """Start the first process ahead of the first call. Raises UNSUPPORTED where there is no transformers."""
        if self._shelf.config.processors:
            segment_library()
            await self._processors.warm()

    async def close(self) -> None:
        """Stop what is being made, end the processes."""
        await self._made.close()
        await self._processors.close()

    async def find_or_make(
        self, ref: MediaRef, class_name: str, config_json: str, claimed: str
    ) -> tuple[SegmentRecord, bool]:
        """Tensors of an object under a processor, and whether they were made now.

        claimed: the fingerprint that the caller expects, "" for any. Raises OmnifleetError: UNSUPPORTED,
        INVALID_REQUEST, CONTRACT_MISMATCH, NOT_FOUND, MEDIA_LOST.
        """
        if class_name not in self._shelf.config.processors:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"processor class {class_name!r} is not one of {', '.join(self._shelf.config.processors)}",
                knob="media.processors",
            )
        config = _parse_config(config_json)
        # The frames of a clip are chosen by its decode contract, before any processor sees them.
        sampling = _SAMPLING[kind_of(class_name)]
        fingerprint = processor_fingerprint(class_name, config, segment_library(), sampling)
        if claimed and claimed != fingerprint:
            raise OmnifleetError(
                Reason.CONTRACT_MISMATCH,
                f"this service makes segments with {segment_library()}, whose fingerprint is {fingerprint}, not {claimed}",
                knob="install matching versions of transformers",
            )
        key = segment_key(ref.digest, fingerprint)
        work = {"class_name": class_name, "config": config, "config_json": config_json}
        joins = self._made.running(key)
        record, made = await self._made.do(
            key,
            lambda: self._flights.find_or_make(
                key,
                lambda: self._find(key),
                lambda: self._make(ref.digest, key, fingerprint, work),
            ),
        )
        self._shelf.retention.used(Unit.SEGMENT, key)
        self._shelf.counters.add("segments_served")
        return record, made and not joins

    async def _find(self, key: Digest) -> SegmentRecord | None:
        record = await self._shelf.index.read_segment(key)
        return record if record is not None and await self._shelf.holds([record_blob(record)]) else None

    async def _make(
        self, media: Digest, key: Digest, fingerprint: Digest, work: Mapping[str, object]
    ) -> SegmentRecord:
        item = await self._shelf.read(media)
        wanted = kind_of(str(work["class_name"]))
        if item.kind is not wanted:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"{work['class_name']} takes media of kind {wanted}, not {item.kind}"
            )
        shape = [len(item.frames), item.height, item.width, 3]
        if wanted is MediaKind.AUDIO:
            shape = [item.width, item.height]
        answer, body = await self._processors.call({**work, "shape": shape}, await self._joined(item))
        self._shelf.counters.add("segments_computed")
        content = await asyncio.to_thread(digest_bytes, body, "tensors")
        record = SegmentRecord(
            key, media, fingerprint, answer["token_count"], tuple(answer["grid"]), len(body), content
        )
        blob = segment_blob(key, content)
        await self._shelf.write([(blob, body)], [], lambda: self._shelf.index.write_segment(record, now_ms()))
        return record

    async def _joined(self, item: MediaObject) -> memoryview:
        """All frames in order, one after the other."""
        opened = {digest: await self._shelf.open(Kind.FRAME, digest) for digest in dict.fromkeys(item.frames)}
        if len(item.frames) == 1:
            return opened[item.frames[0]]
        return memoryview(await asyncio.to_thread(b"".join, [opened[digest] for digest in item.frames]))

    async def moments_s(self, record: SegmentRecord) -> list[float]:
        """Seconds of the first frame of each temporal patch of a clip's segment; nothing for a picture's."""
        item = await self._shelf.index.read_object(record.media)
        if item is None or not item.timestamps_us or not record.grid:
            return []
        step = -(-len(item.timestamps_us) // record.grid[0])
        return [us / 1_000_000 for us in item.timestamps_us[::step]]


def _parse_config(config_json: str) -> dict[str, object]:
    if len(config_json) > _CONFIG_BYTES:
        raise invalid(
            f"the processor's config has {len(config_json)} characters, at most {_CONFIG_BYTES} are allowed"
        )
    try:
        config = json.loads(config_json)
    except ValueError as error:
        raise invalid(f"the processor's config is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise invalid("the processor's config is not a JSON object")
    return config
