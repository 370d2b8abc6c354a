"""A real Redis server that a test starts, kills, pauses and starts again at the same address."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis

_UP_S = 30.0


class RedisServer:
    """One server on a Unix socket in a folder of its own; its append-only file survives a kill."""

    def __init__(self, folder: Path, *options: str) -> None:
        self._folder = folder
        self._options = options
        self.url = f"unix://{folder / 's'}?db=0"
        self._process: subprocess.Popen[bytes] | None = None
        self.start()

    def start(self) -> None:
        """Start and wait until it answers."""
        options = ["--port", "0", "--unixsocket", str(self._folder / "s"), "--dir", str(self._folder)]
        options += [
            "--appendonly",
            "yes",
            "--save",
            "",
            "--logfile",
            str(self._folder / "log"),
            *self._options,
        ]
        self._process = subprocess.Popen(["redis-server", *options], stdin=subprocess.DEVNULL)
        end = time.monotonic() + _UP_S
        while True:
            try:
                self.ask("PING")
                return
            except redis.RedisError:
                if self._process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError((self._folder / "log").read_text()) from None
                time.sleep(0.02)  # nothing else tells that a server listens

    def kill(self) -> None:
        """kill -9."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def ask(self, *command: Any) -> Any:
        """One command on a connection of its own."""
        with redis.Redis.from_url(self.url, decode_responses=True) as connection:
            return connection.execute_command(*command)


@contextlib.contextmanager
def redis_server(*options: str) -> Iterator[RedisServer]:
    """A server for the length of this block. The folder's name is short: a socket's path holds 107 characters."""
    folder = Path(tempfile.mkdtemp(prefix="omnifleet-redis-"))
    server = None
    try:
        server = RedisServer(folder, *options)
        yield server
    finally:
        if server is not None:
            server.kill()
        shutil.rmtree(folder, ignore_errors=True)
