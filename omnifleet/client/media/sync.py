"""The same client for code without an event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections.abc import Coroutine, Iterable, Sequence
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Any, Self, TypeVar

from omnifleet.client.media.answers import Collected, MediaInfo, Segment, Stat, Verified
from omnifleet.client.media.client import MediaClient
from omnifleet.client.media.reading import Frame, Track
from omnifleet.client.status import ServiceStatus
from omnifleet.errors import OmnifleetError
from omnifleet.processor import ImageProcessorSpec
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.types import Lease, MediaRef
from omnifleet.wire import media_pb2

Answer = TypeVar("Answer")


class SyncMediaClient:
    """`with SyncMediaClient(address, secret) as media`: methods of `MediaClient` that block; any thread may call them.

    One thread of its own speaks to the service. Frames and segments that are kept or in shared memory are answered
    in the caller's thread.
    """

    def __init__(self, address: str, secret: str = "", **options: Any) -> None:
        """options: those of `MediaClient.open` (name, deadline_s, cache_bytes, same_host, verify_mapped)."""
        self._address, self._secret, self._options = address, secret, options
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="media-client", daemon=True)
        self._stack = AsyncExitStack()
        self._client: MediaClient | None = None

    def __enter__(self) -> Self:
        """Connect. Raises what `MediaClient.open` raises."""
        self._thread.start()
        try:
            opened = MediaClient.open(self._address, self._secret, **self._options)
            self._client = self._do(self._stack.enter_async_context(opened))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Disconnect; what is running is cancelled."""
        self._client = None
        try:
            self._do(self._stack.aclose())
        finally:
            self._end()

    @property
    def client(self) -> MediaClient:
        """The asyncio client underneath; its coroutines belong to this client's own loop."""
        if self._client is None:
            raise RuntimeError("use this client inside its `with` block")
        return self._client

    @property
    def payload(self) -> PayloadMeter:
        """As of `MediaClient`."""
        return self.client.payload

    # ------------------------------------------------------------------ sources in

    def put_image(self, data: bytes, run: str, durable: bool = False) -> MediaRef:
        """As `MediaClient.put_image`."""
        return self._do(self.client.put_image(data, run, durable))

    def put_many(
        self, sources: Sequence[bytes], run: str, **options: Any
    ) -> list[media_pb2.PutReply | OmnifleetError]:
        """As `MediaClient.put_many`."""
        return self._do(self.client.put_many(sources, run, **options))

    def put(self, data: bytes, run: str, **options: Any) -> media_pb2.PutReply:
        """As `MediaClient.put`."""
        return self._do(self.client.put(data, run, **options))

    def put_url(self, url: str, run: str, **options: Any) -> media_pb2.PutReply:
        """As `MediaClient.put_url`."""
        return self._do(self.client.put_url(url, run, **options))

    def decode(self, source_digest: str, run: str, **options: Any) -> media_pb2.PutReply:
        """As `MediaClient.decode`."""
        return self._do(self.client.decode(source_digest, run, **options))

    # ------------------------------------------------------------------ content out

    def info(self, ref: MediaRef) -> MediaInfo:
        """As `MediaClient.info`."""
        return self._do(self.client.info(ref))

    def stat(self, digest: str) -> Stat:
        """As `MediaClient.stat`."""
        return self._do(self.client.stat(digest))

    def has(self, digests: Sequence[str]) -> list[bool]:
        """As `MediaClient.has`."""
        return self._do(self.client.has(digests))

    def frame(self, ref: MediaRef, i: int = 0) -> Frame:
        """As `MediaClient.frame`."""
        kept = self.client.kept_frame(ref, i)
        return kept if kept is not None else self._do(self.client.frame(ref, i))

    def frames(self, ref: MediaRef) -> list[Frame]:
        """As `MediaClient.frames`."""
        return self._do(self.client.frames(ref))

    def track(self, ref: MediaRef) -> Track:
        """As `MediaClient.track`."""
        return self._do(self.client.track(ref))

    def source(self, digest: str) -> bytes:
        """As `MediaClient.source`."""
        return self._do(self.client.source(digest))

    def segment(self, ref: MediaRef, spec: ImageProcessorSpec, run: str) -> Segment:
        """As `MediaClient.segment`."""
        kept = self.client.kept_segment(ref, spec)
        return kept if kept is not None else self._do(self.client.segment(ref, spec, run))

    # ------------------------------------------------------------------ leases and operators

    def take_lease(self, digests: Iterable[str], owner: str, run: str, ttl_s: float) -> Lease:
        """As `MediaClient.take_lease`."""
        return self._do(self.client.take_lease(digests, owner, run, ttl_s))

    def renew_lease(self, lease: Lease, ttl_s: float) -> Lease:
        """As `MediaClient.renew_lease`."""
        return self._do(self.client.renew_lease(lease, ttl_s))

    def release_lease(self, lease: Lease) -> bool:
        """As `MediaClient.release_lease`."""
        return self._do(self.client.release_lease(lease))

    def status(self) -> ServiceStatus:
        """As `MediaClient.status`."""
        return self._do(self.client.status())

    def collect(self, target_bytes: int, dry_run: bool = False) -> Collected:
        """As `MediaClient.collect`."""
        return self._do(self.client.collect(target_bytes, dry_run))

    def verify(self, digests: Iterable[str] = ()) -> Verified:
        """As `MediaClient.verify`."""
        return self._do(self.client.verify(digests))

    # ------------------------------------------------------------------ the thread

    def _do(self, work: Coroutine[Any, Any, Answer]) -> Answer:
        """Run in the client's thread. A caller that is interrupted (Ctrl-C) cancels the work."""
        future: concurrent.futures.Future[Answer] = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _end(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()
