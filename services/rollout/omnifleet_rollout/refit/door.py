"""Orders to stage or to hand out weights, on a socket of the process that holds them: none waits for a step of its engine.

The name is in Linux's abstract space: no file is left behind by a process that is killed. Only processes of our own user
are answered.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_rollout.refit.source import GROUP

log = logging.getLogger("omnifleet.rollout.refit")
Tell = Callable[[int | OmnifleetError], None]
Begin = Callable[[str, str, Tell, bool], None]
Export = Callable[[str, Sequence[tuple[str, str]]], int]
_ORDER_BYTES = 256 << 20
_READ_S = 30.0
_CREDENTIALS = struct.Struct("3i")


class Door:
    """Listens from the start.

    begin: takes (manifest as JSON, source, tell, in place) and calls tell once, when the stage has ended. export: takes (path,
    names and dtypes of tensors), writes them, and returns the bytes.
    """

    def __init__(self, begin: Begin, export: Export) -> None:
        self._begin, self._export = begin, export
        self.name = f"omnifleet-stage-{os.getpid()}-{secrets.token_hex(8)}"
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind("\0" + self.name)
        self._listener.listen(4)
        threading.Thread(target=self._accept, name="refit door", daemon=True).start()

    def close(self) -> None:
        """Take no more orders."""
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                caller, _ = self._listener.accept()
            except OSError:
                return
            threading.Thread(target=self._answer, args=(caller,), name="refit order", daemon=True).start()

    def _answer(self, caller: socket.socket) -> None:
        ended = threading.Event()

        def tell(end: int | OmnifleetError) -> None:
            # On the thread that staged: to wake ours would take one more turn beside the engine's.
            _send(caller, end)
            ended.set()

        with caller:
            try:
                _check_caller(caller)
                order = json.loads(_read_all(caller))
                if "tensors" in order:
                    tell(self._export(order["path"], [(name, dtype) for name, dtype in order["tensors"]]))
                else:
                    self._begin(order["manifest"], order["source"], tell, order["in_place"])
                ended.wait()
            except OmnifleetError as error:
                _send(caller, error)
            except (OSError, ValueError, KeyError) as error:
                log.warning("an order could not be read: %s", error)


async def knock(name: str, manifest_json: str, source: str, *, in_place: bool = False) -> int:
    """Have the process behind a door stage; bytes. Raises what it says, WORKER_LOST if it ends meanwhile."""
    return await _order(name, {"manifest": manifest_json, "source": source, "in_place": in_place})


async def knock_all(names: Sequence[str], manifest_json: str, source: str, *, in_place: bool = False) -> int:
    """Have all processes of an engine stage; bytes of the first. Raises as `knock`, what the first says that refuses.

    All have ended then, so that nobody reads any more what the sender takes back. But in a group they may wait for the one
    that refused: until its end is known, they do not end.
    """
    orders = (knock(name, manifest_json, source, in_place=in_place) for name in names)
    if source.startswith(GROUP):
        return (await asyncio.gather(*orders))[0]
    ends = await asyncio.gather(*orders, return_exceptions=True)
    sizes = [_size_of(end) for end in ends]
    return sizes[0]


async def ask_for_tensors(name: str, path: str, tensors: Sequence[tuple[str, str]]) -> int:
    """Have the process behind a door write tensors into a file; bytes. Raises as `knock`."""
    return await _order(name, {"path": path, "tensors": list(tensors)})


async def _order(name: str, order: Mapping[str, Any]) -> int:
    try:
        # Connected by ourselves: uvloop's own way knows no abstract names.
        caller = await asyncio.to_thread(_connected, name)
        reader, writer = await asyncio.open_unix_connection(sock=caller)
        try:
            writer.write(json.dumps(order).encode())
            writer.write_eof()
            answer = await reader.read(-1)
        finally:
            writer.close()
    except OSError as error:
        raise retryable(Reason.WORKER_LOST, f"the engine's process is gone: {error}") from error
    if not answer:
        raise retryable(Reason.WORKER_LOST, "the engine's process ended while it did so")
    word: dict[str, Any] = json.loads(answer)
    if "reason" in word:
        raise OmnifleetError(Reason(word["reason"]), word["message"], word["retryable"], word["knob"])
    return int(word["bytes"])


def _size_of(end: int | BaseException) -> int:
    if isinstance(end, BaseException):
        raise end
    return end


def _connected(name: str) -> socket.socket:
    caller = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        caller.settimeout(_READ_S)
        caller.connect("\0" + name)
    except OSError:
        caller.close()
        raise
    caller.setblocking(False)
    return caller


def _send(caller: socket.socket, end: int | OmnifleetError) -> None:
    word = _refusal(end) if isinstance(end, OmnifleetError) else {"bytes": end}
    try:
        caller.sendall(json.dumps(word).encode())
        caller.shutdown(socket.SHUT_WR)
    except OSError:
        return  # who asked is gone; what is staged waits for the next order


def _check_caller(caller: socket.socket) -> None:
    raw = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    if _CREDENTIALS.unpack(raw)[1] != os.getuid():
        raise OmnifleetError(Reason.FORBIDDEN, "this socket is for processes of its own user")


def _read_all(caller: socket.socket) -> bytes:
    caller.settimeout(_READ_S)
    data = bytearray()
    while piece := caller.recv(1 << 20):
        data += piece
        if len(data) > _ORDER_BYTES:
            raise OmnifleetError(Reason.LIMIT_EXCEEDED, f"an order of more than {_ORDER_BYTES} bytes")
    caller.settimeout(None)
    return bytes(data)


def _refusal(error: OmnifleetError) -> dict[str, Any]:
    return {
        "reason": str(error.reason),
        "message": error.message,
        "retryable": error.retryable,
        "knob": error.knob,
    }
