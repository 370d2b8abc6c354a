"""A pool of processes of one role: one request a process, a time limit each, replacement of what is stuck or dead."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_media.sandbox.arena import ARENA_BYTES, Arena, make_arena
from omnifleet_media.sandbox.frames import HEADER_BYTES, LENGTHS, Header, send

log = logging.getLogger("omnifleet.media")

_START_S = 180.0
_WAITING = 256
_BUFFER_BYTES = 4 << 20


@dataclass(slots=True, eq=False)
class _Child:
    process: subprocess.Popen[bytes]
    sock: socket.socket
    arena: Arena
    facts: Header

    def end(self) -> None:
        self.process.kill()  # whoever waits for its answer reads the end of the stream now
        self.process.wait()
        self.sock.close()


class _Lost(Exception):
    """The process closed its end in the middle of a frame."""


class ProcessPool:
    """`size` processes of `role` (see sandbox.child.ROLES), started when first needed.

    work_s: longest answer to one request. memory_bytes: address space that a process may add after its imports.
    reply_bytes: largest answer that is received. knobs name the settings for errors.
    """

    def __init__(
        self, role: str, size: int, *, work_s: float, memory_bytes: int, reply_bytes: int, time_knob: str
    ) -> None:
        self._role, self._work_s, self._memory_bytes = role, work_s, memory_bytes
        self._reply_bytes, self._time_knob = reply_bytes, time_knob
        self._idle: asyncio.LifoQueue[_Child | None] = asyncio.LifoQueue()
        for _ in range(size):
            self._idle.put_nowait(None)
        self._busy: set[_Child] = set()
        # A thread for each process: megabytes arrive in one blocking call instead of many turns of the event loop.
        self._threads = ThreadPoolExecutor(size, thread_name_prefix=f"media-{role}")
        self._waiting = 0
        self.replaced = 0

    @property
    def busy(self) -> int:
        """Processes with a request."""
        return len(self._busy)

    async def warm(self) -> Header:
        """Start one process ahead of the first request; answers its facts."""
        child = await self._idle.get()
        try:
            child = child or await self._start()
            return child.facts
        finally:
            self._idle.put_nowait(child)

    async def call(self, header: Header, body: bytes | memoryview = b"") -> tuple[Header, memoryview]:
        """One request to a free process. Raises what the role names, LIMIT_EXCEEDED past the time limit,
        INVALID_MEDIA if the input ends the process twice, OVERLOADED if too many wait."""
        for _ in range(2):
            answer = await self._try(header, body)
            if answer is not None:
                return _checked(*answer)
        raise OmnifleetError(Reason.INVALID_MEDIA, f"the input ended two {self._role} processes")

    async def close(self) -> None:
        """End all processes."""
        while not self._idle.empty():
            child = self._idle.get_nowait()
            if child is not None:
                child.end()
        for child in list(self._busy):
            child.end()
        self._threads.shutdown(wait=False)

    async def _try(self, header: Header, body: bytes | memoryview) -> tuple[Header, memoryview] | None:
        """One attempt in the next free slot, which is given back in every case. None: the process died."""
        child = await self._slot()
        try:
            child = child or await self._start()
            self._busy.add(child)
            async with asyncio.timeout(self._work_s):
                answer = await self._exchange(child, header, body)
        except TimeoutError:
            self._drop(child)
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"one request took longer than {self._work_s:g} s; its process was replaced",
                knob=self._time_knob,
            ) from None
        except (_Lost, OSError) as error:
            log.warning("a %s process was lost: %r", self._role, error)
            self._drop(child)
            return None
        except BaseException:  # cancelled in the middle of a frame: the process can't be spoken to any more
            self._drop(child)
            raise
        self._busy.discard(child)
        self._idle.put_nowait(child)
        return answer

    async def _slot(self) -> _Child | None:
        """A free process, or None for one that has yet to start. Raises OVERLOADED if too many wait already."""
        if self._waiting >= _WAITING:
            raise retryable(
                Reason.OVERLOADED,
                f"{self._waiting} requests wait for {self._role} processes",
                knob="media.decoders",
                retry_after_ms=200,
            )
        self._waiting += 1
        try:
            return await self._idle.get()
        finally:
            self._waiting -= 1

    def _drop(self, child: _Child | None) -> None:
        if child is not None:
            self._busy.discard(child)
            child.end()
            self.replaced += 1
        self._idle.put_nowait(None)

    async def _start(self) -> _Child:
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # as large as the system allows: fewer turns for each megabyte
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        started = time.monotonic()
        arena_fd = make_arena()
        try:
            arena = Arena(arena_fd)
            child = _Child(_spawn(self._role, theirs, arena_fd, self._memory_bytes), ours, arena, {})
        finally:
            theirs.close()
            os.close(arena_fd)
        try:
            async with asyncio.timeout(_START_S):
                child.facts, _ = await asyncio.get_running_loop().run_in_executor(
                    self._threads, self._receive, child
                )
        except (_Lost, OSError, TimeoutError) as error:
            child.end()
            raise retryable(
                Reason.UNAVAILABLE, f"a {self._role} process did not start: {error or type(error).__name__}"
            ) from error
        except BaseException:
            child.end()
            raise
        if child.facts.get("unfiltered"):
            log.warning(
                "%s process %d runs without a seccomp filter: %s",
                self._role,
                child.process.pid,
                child.facts["unfiltered"],
            )
        log.info(
            "%s process %d is up after %.1f s", self._role, child.process.pid, time.monotonic() - started
        )
        return child

    async def _exchange(
        self, child: _Child, header: Header, body: bytes | memoryview
    ) -> tuple[Header, memoryview]:
        def converse() -> tuple[Header, memoryview]:
            send(child.sock, child.arena, header, body)
            return self._receive(child)

        return await asyncio.get_running_loop().run_in_executor(self._threads, converse)

    def _receive(self, child: _Child) -> tuple[Header, memoryview]:
        header_bytes, body_bytes, in_arena = LENGTHS.unpack(_exactly(child.sock, LENGTHS.size))
        largest = min(self._reply_bytes, ARENA_BYTES) if in_arena else self._reply_bytes
        if header_bytes > HEADER_BYTES or body_bytes > largest:
            raise _Lost(f"frame of {header_bytes} + {body_bytes} bytes")
        header = json.loads(bytes(_exactly(child.sock, header_bytes)))
        if not in_arena:
            return header, _exactly(child.sock, body_bytes)
        body = _room(body_bytes)
        child.arena.copy_to(body)
        return header, body


def _spawn(role: str, sock: socket.socket, arena_fd: int, memory_bytes: int) -> subprocess.Popen[bytes]:
    environment = {
        name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH", "LANG") if name in os.environ
    }
    environment |= {
        "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        "OMP_NUM_THREADS": "1",
        "MALLOC_ARENA_MAX": "1",  # decoders start threads for every clip; an arena for each never shrinks
    }
    command = [
        sys.executable,
        "-m",
        "omnifleet_media.sandbox.child",
        role,
        str(sock.fileno()),
        str(arena_fd),
        str(memory_bytes),
    ]
    return subprocess.Popen(
        command,
        pass_fds=(sock.fileno(), arena_fd),
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
    )


def _exactly(sock: socket.socket, size: int) -> memoryview:
    view = _room(size)
    filled = 0
    while filled < size:
        got = sock.recv_into(view[filled:], size - filled, socket.MSG_WAITALL)
        if got == 0:
            raise _Lost("closed its socket")
        filled += got
    return view


def _room(size: int) -> memoryview:
    return np.empty(size, np.uint8).data  # not filled with zeros first


def _checked(header: Header, body: memoryview) -> tuple[Header, memoryview]:
    error = header.get("error")
    if error is not None:
        raise OmnifleetError(Reason(error["reason"]), error["message"], knob=error["knob"])
    return header, body
