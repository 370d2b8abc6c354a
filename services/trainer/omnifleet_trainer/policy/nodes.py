"""Ranks of a policy on other nodes: processes there come to the first rank, prove that they are of the run, and follow.

The first rank opens a door and says where in the run's folder, as services do; on each other node `omnifleet trainer follow`
makes one connection a rank, which becomes the input and output of that rank's process, and one more that tells when the
first rank is gone: then it ends its ranks, and waits for the next world. The run's folder, checkpoints and the model's are
on a file system that all nodes see.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import logging
import os
import socket
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, cast

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.frames import receive, send

log = logging.getLogger("omnifleet.trainer")
RECORD = "ranks.json"
"""In the run's folder: where the first rank of the newest world listens."""
_WATCH = -1
_HELLO_S = 10.0
_HELLO_BYTES = 4096
_POLL_S = 0.2
_LEAVE_S = 10.0


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where a policy's nodes find one another: by the run's folder, knowing its secret. host: address of the first node that
    the others reach, None = the one that its name stands for."""

    run_dir: Path
    secret: str
    host: str | None = None

    def address(self) -> str:
        """The first node's."""
        return self.host or socket.gethostbyname(socket.gethostname())


@dataclass(slots=True)
class Remote:
    """A rank's process on another node, as far as this one sees it: what `subprocess.Popen` is for a child."""

    connection: socket.socket
    stdin: BinaryIO
    stdout: BinaryIO
    pid: int = 0
    _gone: threading.Event = field(default_factory=threading.Event)

    def poll(self) -> int | None:
        """None while the connection lives, else -1: how it ended is known there."""
        return -1 if self._gone.is_set() else None

    def wait(self, timeout: float | None = None) -> int:
        """Until the connection ends; at its end at once. Raises subprocess.TimeoutExpired."""
        if not self._gone.wait(timeout):
            raise subprocess.TimeoutExpired("follower", timeout or 0.0)
        return -1

    def kill(self) -> None:
        """End the connection; the rank ends with it."""
        self._gone.set()
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)

    def ended(self) -> None:
        """Nothing more comes."""
        self._gone.set()


class Door:
    """Listens for the ranks of other nodes until all are in; closing it ends them."""

    def __init__(self, meeting: Meeting) -> None:
        self._meeting = meeting
        self._socket = socket.create_server(("", 0), family=socket.AF_INET, backlog=64)
        self._watches: list[socket.socket] = []
        port = self._socket.getsockname()[1]
        body = {"host": meeting.address(), "port": port, "world": uuid.uuid4().hex}
        scratch = meeting.run_dir / f".{RECORD}.{os.getpid()}.tmp"
        scratch.write_text(json.dumps(body))
        scratch.replace(meeting.run_dir / RECORD)

    def admitted(self, ranks: Sequence[int], timeout_s: float) -> dict[int, Remote]:
        """A process for each of `ranks`. Raises OmnifleetError(UNAVAILABLE, retryable) if one does not come in time."""
        found: dict[int, Remote] = {}
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank in ranks if rank not in found]:
            self._socket.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, peer = self._socket.accept()
            except TimeoutError:
                for remote in found.values():
                    remote.kill()
                raise OmnifleetError(
                    Reason.UNAVAILABLE,
                    f"ranks {missing} of the policy did not come from their nodes within {timeout_s:g} s: does "
                    "`omnifleet trainer follow` run there, with the same run folder?",
                    retryable=True,
                    knob="trainer.parallel.nodes",
                ) from None
            reader = cast(BinaryIO, connection.makefile("rb"))
            rank = self._rank(connection, reader, str(peer[0]))
            if rank == _WATCH:
                self._watches.append(connection)
            elif rank in missing:
                found[rank] = Remote(connection, cast(BinaryIO, connection.makefile("wb")), reader)
            else:
                reader.close()
                connection.close()
        return found

    def close(self) -> None:
        """Stop listening, and tell the nodes that this world is over."""
        for connection in (self._socket, *self._watches):
            connection.close()

    def _rank(self, connection: socket.socket, reader: BinaryIO, peer: str) -> int | None:
        """Whose connection it is; None if it does not know the secret."""
        connection.settimeout(_HELLO_S)
        try:
            message = receive(reader, most=_HELLO_BYTES)
        except (OSError, ValueError):
            message = None
        body: dict[str, Any] = message[0] if message is not None else {}
        if not hmac.compare_digest(str(body.get("secret", "")).encode(), self._meeting.secret.encode()):
            log.warning("a process at %s wanted to be a rank without knowing the run's secret", peer)
            return None
        connection.settimeout(None)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        return int(body["rank"])


def follow(meeting: Meeting, ranks: Sequence[int], stopped: threading.Event) -> None:
    """Serve as `ranks` of one world after another until `stopped`."""
    served = ""
    while not stopped.wait(_POLL_S):
        try:
            found = json.loads((meeting.run_dir / RECORD).read_text())
            if found["world"] != served:
                _follow_one(meeting, (found["host"], found["port"]), ranks, stopped)
                served = found["world"]
        except OSError as error:
            log.debug("there is no first rank: %s", error)


def _follow_one(
    meeting: Meeting, address: tuple[str, int], ranks: Sequence[int], stopped: threading.Event
) -> None:
    watch = _connected(meeting, address, _WATCH)
    processes: list[subprocess.Popen[bytes]] = []
    log.info("ranks %s follow the first rank at %s:%d", list(ranks), *address)
    try:
        for rank in ranks:
            with _connected(meeting, address, rank) as connection:
                command = [sys.executable, "-m", "omnifleet_trainer.policy.follower", str(os.getpid())]
                stream = connection.fileno()
                processes.append(subprocess.Popen(command, stdin=stream, stdout=stream))
        watch.settimeout(_POLL_S)
        while not stopped.is_set() and any(process.poll() is None for process in processes):
            with contextlib.suppress(TimeoutError):
                if not watch.recv(1):
                    break
    finally:
        watch.close()
        deadline = time.monotonic() + (0.0 if stopped.is_set() else _LEAVE_S)
        for process in processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    log.info("ranks %s have left: %s", list(ranks), [process.returncode for process in processes])


def _connected(meeting: Meeting, address: tuple[str, int], rank: int) -> socket.socket:
    connection = socket.create_connection(address, timeout=_HELLO_S)
    connection.settimeout(None)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    with connection.makefile("wb") as stream:
        send(cast(BinaryIO, stream), {"rank": rank, "secret": meeting.secret})
    return connection
