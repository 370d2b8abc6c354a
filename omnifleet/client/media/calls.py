"""Calls of the media service: deadlines, retries of passing failures, streams in and out."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import grpc.aio

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.wire import common_pb2, media_pb2
from omnifleet.wire.counting import CountingChannel
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from omnifleet.wire.server import CHUNK_BYTES

Answer = TypeVar("Answer")

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.05, 1.0
PASSING = frozenset({Reason.UNAVAILABLE, Reason.OVERLOADED, Reason.DRAINING})
"""Reasons that a call is tried again for, by itself."""


class MediaCalls:
    """Every call has a deadline of `deadline_s` seconds, inside which passing failures are retried."""

    def __init__(self, channel: grpc.aio.Channel, deadline_s: float, meter: PayloadMeter) -> None:
        self._stub: Any = MediaStub(CountingChannel(channel, meter))  # type: ignore[no-untyped-call]
        self._deadline_s = deadline_s

    async def ask(self, method: str, request: Any) -> Any:
        """One message for one. Raises OmnifleetError."""
        return await self._retry(lambda left: getattr(self._stub, method)(request, timeout=left))

    async def put(self, header: media_pb2.PutHeader, data: bytes | memoryview) -> media_pb2.PutReply:
        """A header and the bytes after it, in chunks."""
        return await self._retry(lambda left: self._stub.Put(_put_requests(header, data), timeout=left))

    async def get(
        self, request: media_pb2.GetRequest, largest: int
    ) -> tuple[media_pb2.GetHeader, memoryview]:
        """A header and the bytes after it: none if the header names a file to map. The bytes are not checked.

        largest: bytes that are received; an answer that announces more is refused (CORRUPT) before it is allocated.
        """
        return await self._retry(lambda left: self._get(request, largest, left))

    async def _get(
        self, request: media_pb2.GetRequest, largest: int, left: float
    ) -> tuple[media_pb2.GetHeader, memoryview]:
        header: media_pb2.GetHeader | None = None
        data, filled = bytearray(), 0
        async for reply in self._stub.Get(request, timeout=left):
            if header is None:
                header = reply.header
                if header.bytes > largest:
                    raise OmnifleetError(
                        Reason.CORRUPT, f"{request.digest} has {header.bytes} bytes, not at most {largest}"
                    )
                data = bytearray(0 if header.shm_path else header.bytes)
                continue
            piece = reply.chunk.data
            if filled + len(piece) > len(data):
                raise _broken_stream(request, f"has more than the {len(data)} bytes that it announced")
            data[filled : filled + len(piece)] = piece
            filled += len(piece)
        if header is None or filled != len(data):
            raise _broken_stream(request, f"ended at byte {filled}")
        return header, memoryview(data).toreadonly()

    async def _retry(self, call: Callable[[float], Awaitable[Answer]]) -> Answer:
        end = time.monotonic() + self._deadline_s
        pause = _FIRST_PAUSE_S
        while True:
            try:
                with remote_errors():
                    return await call(max(end - time.monotonic(), 0.001))
            except OmnifleetError as error:
                wait = max(pause * random.uniform(0.5, 1.5), error.retry_after_ms / 1000)
                if error.reason not in PASSING or time.monotonic() + wait >= end:
                    raise
            await asyncio.sleep(wait)
            pause = min(2 * pause, _LONGEST_PAUSE_S)


async def _put_requests(
    header: media_pb2.PutHeader, data: bytes | memoryview
) -> AsyncIterator[media_pb2.PutRequest]:
    yield media_pb2.PutRequest(header=header)
    for offset in range(0, len(data), CHUNK_BYTES):
        piece = bytes(data[offset : offset + CHUNK_BYTES])
        last = offset + len(piece) == len(data)
        yield media_pb2.PutRequest(chunk=common_pb2.Chunk(data=piece, offset=offset, last=last))


def _broken_stream(request: media_pb2.GetRequest, what: str) -> OmnifleetError:
    return OmnifleetError(Reason.UNAVAILABLE, f"the stream of {request.digest} {what}", retryable=True)
