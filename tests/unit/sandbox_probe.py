"""A role that tries what a decoder never should. Runs in a decoder process; see test_media_sandbox."""

from __future__ import annotations

import ctypes
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from omnifleet_media.sandbox.frames import Header, Room

_libc = ctypes.CDLL(None, use_errno=True)


def prepare() -> Header:
    """Nothing to load."""
    return {}


def work(header: Header, body: bytearray, room: Room) -> tuple[Header, Sequence[memoryview]]:
    """header: `try`, the name of an action. Answers `outcome`: what it gave, or the name of its error."""
    try:
        return {"outcome": ACTIONS[header["try"]](header.get("path", "")), "pid": os.getpid()}, ()
    except (OSError, threading.ThreadError) as error:
        return {"outcome": type(error).__name__, "pid": os.getpid()}, ()


def _connect(path: str) -> str:
    with socket.socket() as sock:
        sock.connect(("127.0.0.1", int(path)))
    return "connected"


def _run(path: str) -> str:
    return subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, check=True).stdout.decode()


def _fork(path: str) -> str:
    if os.fork() == 0:
        os._exit(0)
    return "forked"


def _thread(path: str) -> str:
    said: list[str] = []
    thread = threading.Thread(target=said.append, args=("ran",))
    thread.start()
    thread.join()
    return said[0]


def _thread_connects(path: str) -> str:
    said: list[str] = []

    def attempt() -> None:
        try:
            said.append(_connect(path))
        except OSError as error:
            said.append(type(error).__name__)

    thread = threading.Thread(target=attempt)
    thread.start()
    thread.join()
    return said[0]


def _signal(path: str) -> str:
    os.kill(int(path), 0)
    return "signalled"


def _sleep(path: str) -> str:
    """A minute in native code that keeps the interpreter's lock, as a decoder's endless loop would."""
    ctypes.PyDLL(None).sleep(60)
    return "slept"


def _crash(path: str) -> str:
    ctypes.string_at(0)
    return "survived"


def _grow(path: str) -> str:
    return str(len(bytearray(4 << 30)))


ACTIONS: dict[str, Callable[[str], str]] = {
    "read": lambda path: Path(path).read_text(),
    "write": lambda path: str(Path(path).write_text("x")),
    "remove": lambda path: str(os.remove(path)),
    "connect": _connect,
    "run": _run,
    "fork": _fork,
    "thread": _thread,
    "thread connects": _thread_connects,
    "signal": _signal,
    "sleep": _sleep,
    "crash": _crash,
    "grow": _grow,
    "nothing": lambda path: "done",
}
