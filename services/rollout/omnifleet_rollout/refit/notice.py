"""Word from the engine's processes that a stage is done: a datagram each, so that no engine step has to be waited for."""

from __future__ import annotations

import asyncio
import json
import socket
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason, retryable

_LOOK_S = 1.0


class Notices:
    """`address` is where `tell_at` speaks to."""

    def __init__(self, listener: socket.socket, address: str) -> None:
        self._listener, self.address = listener, address

    @staticmethod
    @contextmanager
    def open() -> Iterator[Notices]:
        """Listen, on a socket in a folder of our own."""
        with tempfile.TemporaryDirectory(prefix="omnifleet-") as folder:
            address = str(Path(folder) / "stage")
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
                listener.bind(address)
                listener.setblocking(False)
                yield Notices(listener, address)

    async def all(self, count: int, alive: Callable[[], bool]) -> list[int]:
        """The sizes that `count` processes staged. Raises the first refusal; WORKER_LOST once not `alive`."""
        sizes: list[int] = []
        while len(sizes) < count:
            try:
                async with asyncio.timeout(_LOOK_S):
                    raw = await asyncio.get_running_loop().sock_recv(self._listener, 1 << 16)
            except TimeoutError:
                if not alive():
                    raise retryable(Reason.WORKER_LOST, "the engine died while it staged") from None
                continue
            word: dict[str, Any] = json.loads(raw)
            if "reason" in word:
                raise OmnifleetError(
                    Reason(word["reason"]), word["message"], word["retryable"], knob=word["knob"]
                )
            sizes.append(int(word["bytes"]))
        return sizes


def tell_at(address: str) -> Callable[[int | OmnifleetError], None]:
    """Says once how a stage ended. Nobody may be listening any more."""

    def tell(end: int | OmnifleetError) -> None:
        word: dict[str, Any] = {"bytes": end}
        if isinstance(end, OmnifleetError):
            word = {
                "reason": str(end.reason),
                "message": end.message[:4000],
                "retryable": end.retryable,
                "knob": end.knob,
            }
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as speaker:
            try:
                speaker.sendto(json.dumps(word).encode(), address)
            except OSError:
                return

    return tell
