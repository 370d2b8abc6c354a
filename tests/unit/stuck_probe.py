"""A role that never answers. Runs in a decoder process; see test_media_routes_rows."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from omnifleet_media.sandbox.frames import Header, Room


def prepare() -> Header:
    """Nothing to load."""
    return {}


def work(header: Header, body: bytearray, room: Room) -> tuple[Header, Sequence[memoryview]]:
    """A minute in native code that keeps the interpreter's lock."""
    ctypes.PyDLL(None).sleep(60)
    return {}, ()
