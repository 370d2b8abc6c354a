"""The reading half of the client: content by digest, from this process, from shared memory, or by a call."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from omnifleet.address import digest_bytes, frame_digest, media_digest, source_digest, track_digest
from omnifleet.client.media.answers import MediaInfo, Segment, Stat, info_from_wire
from omnifleet.client.media.cache import LocalCache
from omnifleet.client.media.calls import MediaCalls
from omnifleet.client.media.clip import CLIP_KIND, Clip, read_clip
from omnifleet.client.media.shared import SharedFolder, map_file
from omnifleet.client.media.tensors import read_tensors
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.flight import SingleFlight
from omnifleet.processor import ImageProcessorSpec
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.types import Digest, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_to_wire

Frame = npt.NDArray[np.uint8]
Track = npt.NDArray[np.float32]

_INFOS = 4096
_FRAMES_AT_ONCE = 4
_LARGEST_PART = 4 << 30


class MediaReader:
    """Reads and keeps what it has read.

    payload: bytes of the boundaries `client_frame` and `client_segment` (logical: handed to the caller; physical: that
    had to be mapped or copied into this process) and of every message (serialized).
    """

    def __init__(
        self,
        calls: MediaCalls,
        payload: PayloadMeter,
        *,
        cache_bytes: int,
        same_host: bool,
        verify_mapped: bool,
    ) -> None:
        self._calls, self.payload = calls, payload
        self._same_host, self._verify_mapped = same_host, verify_mapped
        self._shared = SharedFolder()
        self._infos: LocalCache[str, MediaInfo] = LocalCache(_INFOS)
        self._content: LocalCache[tuple[str, ...], Frame | Clip | Segment] = LocalCache(cache_bytes)
        self._loads = 0
        self._segments: SingleFlight[tuple[str, ...], Segment] = SingleFlight()
        self._frames: SingleFlight[str, Frame] = SingleFlight()

    # ------------------------------------------------------------------ objects and pixels out

    async def info(self, ref: MediaRef) -> MediaInfo:
        """The manifest of an object; asked once, since an address never changes its meaning. Raises NOT_FOUND."""
        return self._infos.get(ref.digest) or (await self.stat(ref.digest)).info

    async def stat(self, digest: str) -> Stat:
        """An object, its leases and tiers. Raises NOT_FOUND."""
        reply = await self._calls.ask("Stat", media_pb2.StatRequest(digest=digest))
        return Stat(self._remember(info_from_wire(reply.info)), reply.leases, tuple(reply.tiers))

    async def has(self, digests: Sequence[str]) -> list[bool]:
        """For each media digest, whether the service can serve it."""
        return list((await self._calls.ask("Has", media_pb2.HasRequest(digests=digests))).present)

    def kept_frame(self, ref: MediaRef, i: int = 0) -> Frame | None:
        """A frame without asking the service: kept by this client, or in shared memory. Any thread may call."""
        info = self._infos.get(ref.digest)
        if info is not None and not 0 <= i < len(info.frame_digests):
            return None
        kept = self._content.get(("frame", info.frame_digests[i])) if info is not None else None
        if isinstance(kept, np.ndarray):
            self._moved("client_frame", kept.nbytes, 0)
            return kept
        clip = self._kept_clip(ref, at_once=False)
        if clip is not None:
            return self._given(clip.frames[i : i + 1])[0] if i < len(clip.frames) else None
        if info is None:
            return None
        digest = info.frame_digests[i]
        buffer = self._shared.open("frame", digest, info.height * info.width * 3)
        if buffer is None or (self._verify_mapped and frame_digest(_pixels(buffer, info)) != digest):
            return None
        return self._keep_frame(info, digest, buffer)

    async def frame(self, ref: MediaRef, i: int = 0) -> Frame:
        """Frame `i` of an object: uint8 RGB (H, W, 3), read-only. Raises NOT_FOUND, MEDIA_LOST, CORRUPT."""
        kept = self.kept_frame(ref, i)
        if kept is not None:
            return kept
        info = self._infos.get(ref.digest) or await self._about_to_map(ref)
        kept = self.kept_frame(ref, i)
        if kept is not None:
            return kept
        if not 0 <= i < len(info.frame_digests):
            raise OmnifleetError(
                Reason.NOT_FOUND, f"{ref.url} has frames 0 to {len(info.frame_digests) - 1}, not {i}"
            )
        if info.sample_rate:
            raise invalid(f"{ref.url} is a track: it has samples, no frames")
        digest = info.frame_digests[i]
        joins = self._frames.running(digest)
        pixels = await self._frames.do(digest, lambda: self._load_frame(info, digest))
        if joins:
            self._moved("client_frame", pixels.nbytes, 0)
        return pixels

    async def frames(self, ref: MediaRef) -> list[Frame]:
        """All frames of an object, in order; equal frames are the same array."""
        clip, info = self._kept_clip(ref), self._infos.get(ref.digest)
        found: dict[int, Frame] = {}
        if clip is None and info is not None:
            found = self._kept_frames(ref, range(len(info.frame_digests)))
        if clip is None and (info is None or (self._same_host and len(found) < len(info.frame_digests))):
            info = await self._about_to_map(ref)
            clip = self._kept_clip(ref)
        if clip is not None:
            return self._given(clip.frames)
        assert info is not None
        count = len(info.frame_digests)
        room = asyncio.Semaphore(_FRAMES_AT_ONCE)

        async def one(i: int) -> Frame:
            async with room:
                return await self.frame(ref, i)

        rest = [i for i in range(count) if i not in found]
        found |= dict(zip(rest, await asyncio.gather(*(one(i) for i in rest)), strict=True))
        return [found[i] for i in range(count)]

    async def _about_to_map(self, ref: MediaRef) -> MediaInfo:
        """The manifest, by a call that brings all frames into shared memory and tells where that is."""
        request = media_pb2.StatRequest(digest=ref.digest, same_host=self._same_host)
        reply = await self._calls.ask("Stat", request)
        if reply.shm_path:
            self._shared.learn(reply.shm_path)
        return self._remember(info_from_wire(reply.info))

    def _kept_frames(self, ref: MediaRef, wanted: Iterable[int]) -> dict[int, Frame]:
        return {i: kept for i in wanted if (kept := self.kept_frame(ref, i)) is not None}

    def _kept_clip(self, ref: MediaRef, *, at_once: bool = True) -> Clip | None:
        """An object of several frames that this client keeps, or that is one file in shared memory. Any thread may call.

        at_once: all of it is about to be read.
        """
        kept = self._content.get((CLIP_KIND, ref.digest))
        if isinstance(kept, Clip):
            return kept
        info = self._infos.get(ref.digest)
        if info is not None and len(set(info.frame_digests)) == 1:
            return None
        buffer = self._shared.open(CLIP_KIND, ref.digest, at_once=at_once)
        clip = read_clip(buffer, ref.digest) if buffer is not None else None
        if clip is None or (self._verify_mapped and not _is_right(clip)):
            return None
        self._remember(clip.info)
        self._content.keep((CLIP_KIND, ref.digest), clip, clip.info.bytes)
        distinct = len(set(clip.info.frame_digests))
        self._loads += distinct
        self.payload.moved(
            "client_frame",
            logical_bytes=0,
            physical_bytes=clip.info.bytes,
            logical_segments=0,
            physical_segments=distinct,
        )
        return clip

    def _given(self, frames: Sequence[Frame]) -> list[Frame]:
        """Frames of a clip, counted as handed out."""
        size = sum(frame.nbytes for frame in frames)
        self.payload.moved(
            "client_frame",
            logical_bytes=size,
            physical_bytes=0,
            logical_segments=len(frames),
            physical_segments=0,
        )
        return list(frames)

    async def track(self, ref: MediaRef) -> Track:
        """The samples of an audio object: float32 (N,) at `info(ref).sample_rate` a second, read-only.

        Raises OmnifleetError: INVALID_REQUEST for another kind, NOT_FOUND, MEDIA_LOST, CORRUPT.
        """
        info = await self.info(ref)
        if not info.sample_rate:
            raise invalid(f"{ref.url} is of kind {info.ref.kind}: it has frames, no track")
        digest = info.frame_digests[0]
        buffer, mapped = await self.fetch(media_pb2.OBJECT_PART_FRAME, digest, 4 * info.samples)
        samples = np.frombuffer(buffer, "<f4")
        if len(samples) != info.samples or not (mapped or track_digest(samples, info.sample_rate) == digest):
            raise _changed_on_the_way(digest)
        return samples

    async def source(self, digest: str) -> bytes:
        """The bytes of a source as they were uploaded. Raises NOT_FOUND, MEDIA_LOST, CORRUPT."""
        return bytes((await self.fetch(media_pb2.OBJECT_PART_SOURCE, digest))[0])

    async def fetch(
        self, part: media_pb2.ObjectPart, digest: str, largest: int = _LARGEST_PART
    ) -> tuple[memoryview, bool]:
        """The bytes of one stored part, and whether they are mapped.

        Copied manifests and sources are checked against their digest here; copied frames and segments by the caller,
        who knows their shape and content digest. Raises OmnifleetError: NOT_FOUND, MEDIA_LOST, CORRUPT.
        """
        request = media_pb2.GetRequest(part=part, digest=digest, same_host=self._same_host)
        header, data = await self._calls.get(request, largest)
        if header.shm_path:
            self._shared.learn(header.shm_path)
            buffer = map_file(header.shm_path, header.bytes)
            if buffer is not None:
                return buffer, True
            request.same_host = False  # another host, another user, or evicted since: take the stream
            header, data = await self._calls.get(request, largest)
        _check(part, digest, data)
        return data, False

    async def _load_frame(self, info: MediaInfo, digest: Digest) -> Frame:
        size = info.height * info.width * 3
        buffer, mapped = await self.fetch(media_pb2.OBJECT_PART_FRAME, digest, size)
        if len(buffer) != size:
            raise _changed_on_the_way(digest)
        if (self._verify_mapped or not mapped) and frame_digest(_pixels(buffer, info)) != digest:
            raise _changed_on_the_way(digest)
        return self._keep_frame(info, digest, buffer)

    def _keep_frame(self, info: MediaInfo, digest: Digest, buffer: memoryview) -> Frame:
        pixels = _pixels(buffer, info)
        self._loads += 1
        self._content.keep(("frame", digest), pixels, pixels.nbytes)
        self._moved("client_frame", pixels.nbytes, pixels.nbytes)
        return pixels

    # ------------------------------------------------------------------ segments

    def kept_segment(self, ref: MediaRef, spec: ImageProcessorSpec) -> Segment | None:
        """A segment that this client keeps. Any thread may call."""
        kept = self._content.get(_segment_key(ref, spec))
        if not isinstance(kept, Segment):
            return None
        self._moved("client_segment", kept.bytes, 0)
        return kept

    async def segment(self, ref: MediaRef, spec: ImageProcessorSpec, run: str) -> Segment:
        """The model-ready tensors of `ref` under `spec`: made once per fleet, mapped or cached here.

        Concurrent calls for one key share one request. Raises NOT_FOUND, MEDIA_LOST, INVALID_REQUEST, UNSUPPORTED.
        """
        kept = self.kept_segment(ref, spec)
        if kept is not None:
            return kept
        key = _segment_key(ref, spec)
        joins = self._segments.running(key)
        segment = await self._segments.do(key, lambda: self._load_segment(key, ref, spec, run))
        self._moved("client_segment", segment.bytes, 0 if joins else segment.bytes)
        return segment

    async def _load_segment(
        self, key: tuple[str, ...], ref: MediaRef, spec: ImageProcessorSpec, run: str
    ) -> Segment:
        request = media_pb2.SegmentRequest(
            ref=media_to_wire(ref),
            processor=media_pb2.ProcessorSpec(class_name=spec.class_name, config_json=spec.config_json),
            run=run,
            same_host=self._same_host,
        )
        reply = await self._calls.ask("Segment", request)
        buffer, mapped = None, True
        if reply.shm_path:
            self._shared.learn(reply.shm_path)
            buffer = map_file(reply.shm_path, reply.bytes)
        if buffer is None:
            buffer, mapped = await self.fetch(media_pb2.OBJECT_PART_SEGMENT, reply.key, reply.bytes)
        if (self._verify_mapped or not mapped) and digest_bytes(buffer, "tensors") != reply.content_digest:
            raise _changed_on_the_way(reply.key)
        segment = Segment(
            key=Digest(reply.key),
            fingerprint=Digest(reply.fingerprint),
            token_count=reply.token_count,
            grid=tuple(reply.grid),
            tensors=read_tensors(buffer),
            bytes=reply.bytes,
            mapped=mapped,
            times_s=tuple(reply.times_s),
        )
        self._loads += 1
        self._content.keep(key, segment, segment.bytes)
        return segment

    # ------------------------------------------------------------------ what is kept here

    def kept(self) -> dict[str, float]:
        """The local cache in numbers: bytes kept, hits, and loads (mapped or copied, since they were not kept)."""
        return {"bytes": self._content.used, "hits": self._content.hits, "loads": self._loads}

    async def close(self) -> None:
        """Stop what is being read."""
        await self._segments.close()
        await self._frames.close()

    def forget(self) -> None:
        """Drop the local cache; arrays that callers hold stay whole."""
        self._content.clear()
        self._infos.clear()

    def _remember(self, info: MediaInfo) -> MediaInfo:
        self._infos.keep(info.ref.digest, info, 1)
        return info

    def _moved(self, boundary: str, logical: int, physical: int) -> None:
        self.payload.moved(
            boundary, logical_bytes=logical, physical_bytes=physical, physical_segments=int(physical > 0)
        )


def _segment_key(ref: MediaRef, spec: ImageProcessorSpec) -> tuple[str, ...]:
    return ("segment", ref.digest, spec.class_name, spec.config_json)


def _pixels(buffer: memoryview, info: MediaInfo) -> Frame:
    return np.frombuffer(buffer, np.uint8).reshape(info.height, info.width, 3)


def _is_right(clip: Clip) -> bool:
    """Whether each frame of a clip has the bytes that its digest says."""
    frames = dict(zip(clip.info.frame_digests, clip.frames, strict=True))
    return all(frame_digest(frame) == digest for digest, frame in frames.items())


def _check(part: media_pb2.ObjectPart, digest: str, data: memoryview) -> None:
    """Of the parts whose digest needs nothing but the bytes."""
    if part == media_pb2.OBJECT_PART_SOURCE and source_digest(data) != digest:
        raise _changed_on_the_way(digest)
    if part == media_pb2.OBJECT_PART_MANIFEST and media_digest(bytes(data)) != digest:
        raise _changed_on_the_way(digest)


def _changed_on_the_way(digest: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.CORRUPT, f"{digest} arrived with other bytes than its digest says", retryable=True
    )
