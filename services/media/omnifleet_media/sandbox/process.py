"""One process that works for the service: its start, its frames, its end. Calls block, each with a time limit."""

from __future__ import annotations

import json
import logging
import os
import socket
import struct
import subprocess
import sys
import time

import numpy as np

from omnifleet.errors import Reason, retryable
from omnifleet_media.sandbox.arena import ARENA_BYTES, Arena, make_arena
from omnifleet_media.sandbox.frames import HEADER_BYTES, LENGTHS, Header, send

log = logging.getLogger("omnifleet.media")

_START_S = 180.0
_BUFFER_BYTES = 4 << 20


class Lost(Exception):
    """The process closed its end in the middle of a frame."""


class Late(Exception):
    """The time limit passed in the middle of a frame."""


class Process:
    """A child of `role` (see sandbox.child.ROLES) that has said that it is ready. facts: what it said of itself."""

    def __init__(self, role: str, memory_bytes: int, reply_bytes: int, work_s: float) -> None:
        """memory_bytes: address space that it may add after its imports. reply_bytes: largest answer that is received.
        work_s: longest wait for the socket. Raises OmnifleetError(UNAVAILABLE), retryable, if it does not start."""
        self._reply_bytes = reply_bytes
        ours, theirs = socket.socketpair()
        for end in (ours, theirs):  # as large as the system allows: fewer turns for each megabyte
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _BUFFER_BYTES)
        started, arena_fd = time.monotonic(), make_arena()
        try:
            self._sock, self._arena = ours, Arena(arena_fd)
            self._child = _spawn(role, theirs, arena_fd, memory_bytes)
        finally:
            theirs.close()
            os.close(arena_fd)
        try:
            self._limit(_START_S)
            self.facts, _ = self.receive(0, started + _START_S)
            self._limit(work_s)
        except (Lost, Late, OSError) as error:
            self.end()
            raise retryable(
                Reason.UNAVAILABLE, f"a {role} process did not start: {error or type(error).__name__}"
            ) from error
        except BaseException:
            self.end()
            raise
        if self.facts.get("unfiltered"):
            log.warning(
                "%s process %d runs without a seccomp filter: %s",
                role,
                self._child.pid,
                self.facts["unfiltered"],
            )
        log.info("%s process %d is up after %.1f s", role, self._child.pid, time.monotonic() - started)

    def send(self, lane: int, header: Header, body: bytes | memoryview) -> None:
        """One request, whose body goes through `lane` if it fits. Raises Late, OSError."""
        try:
            send(self._sock, self._arena, lane, header, body)
        except BlockingIOError:
            raise Late from None

    def receive(self, lane: int, end: float) -> tuple[Header, memoryview]:
        """The next answer; its body lies in `lane`, where the process can still change it, or is a copy.

        end: of time.monotonic(). Raises Lost, Late, OSError.
        """
        header_bytes, body_bytes, in_arena = LENGTHS.unpack(self._exactly(LENGTHS.size, end))
        largest = min(self._reply_bytes, ARENA_BYTES) if in_arena else self._reply_bytes
        if header_bytes > HEADER_BYTES or body_bytes > largest:
            raise Lost(f"frame of {header_bytes} + {body_bytes} bytes")
        try:
            header = json.loads(bytes(self._exactly(header_bytes, end)))
        except ValueError:
            header = None
        if not isinstance(header, dict):
            raise Lost("answered a header that is no JSON object")
        body = self._arena.view(lane, body_bytes) if in_arena else self._exactly(body_bytes, end)
        return header, body

    def kill(self) -> None:
        """End it from any thread; whoever waits for its answer reads the end of the stream now."""
        self._child.kill()
        self._child.wait()

    def end(self) -> None:
        """End it and let the socket go; nobody may be waiting."""
        self.kill()
        self._sock.close()

    def _limit(self, seconds: float) -> None:
        limit = struct.pack("@ll", int(seconds), int(seconds % 1 * 1e6))
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, limit)
        self._sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, limit)

    def _exactly(self, size: int, end: float) -> memoryview:
        view = np.empty(size, np.uint8).data  # not filled with zeros first
        filled = 0
        while filled < size:
            try:
                got = self._sock.recv_into(view[filled:], size - filled, socket.MSG_WAITALL)
            except BlockingIOError:
                raise Late from None
            if got == 0:
                raise Lost("closed its socket")
            filled += got
            if filled < size and time.monotonic() > end:
                raise Late
        return view


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
