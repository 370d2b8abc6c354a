"""Rows of a Redis of one's own: a GET through redis-py, whose answers Python parses or, where it is installed, hiredis."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import redis
from redis._parsers import _HiredisParser, _RESP2Parser
from redis.utils import HIREDIS_AVAILABLE
from rows import Call, Row, touch

# redis-py's parsers that are here, by the name of their rows.
PARSERS: dict[str, type[Any]] = {"redis GET": _RESP2Parser}
if HIREDIS_AVAILABLE:
    PARSERS["hiredis GET"] = _HiredisParser


@contextlib.contextmanager
def redis_server(folder: Path) -> Iterator[str]:
    options = ["--port", "0", "--unixsocket", "s", "--save", "", "--logfile", "log"]
    process = subprocess.Popen(["redis-server", *options], cwd=folder)
    try:
        while not (folder / "s").exists():
            time.sleep(0.01)
        yield f"unix://{folder / 's'}?db=0"
    finally:
        process.kill()
        process.wait()


def redis_client(url: str, parser: type[Any]) -> redis.Redis:
    """It connects when it is first used."""
    return redis.Redis.from_url(url, parser_class=parser)


def redis_rows(url: str, key: str) -> dict[str, Row]:
    """A new connection and a kept one, by each of PARSERS."""

    def cold(parser: type[Any]) -> Call:
        async def get() -> Any:
            with redis_client(url, parser) as fresh:
                got = fresh.get(key)
                touch(got)
                return got

        return get

    def warm(client: redis.Redis) -> Call:
        async def get() -> Any:
            got = client.get(key)
            touch(got)
            return got

        return get

    rows = {}
    for name, parser in PARSERS.items():
        rows[f"{name}, new connection"] = Row(cold(parser))
        rows[f"{name}, warm"] = Row(warm(redis_client(url, parser)))
    return rows
