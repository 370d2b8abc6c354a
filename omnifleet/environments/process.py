"""One process of environments: plays many episodes at once on its event loop. `python -m omnifleet.environments.process`.

From the pool: {"hello"} with environments, gateway and secret; {"play", "order"}; {"cancel"}. To the pool: {"ready"} or
{"failed"}; {"played", ...}; {"pulse"} every `_PULSE_S`, which a loop that an environment blocks can't send.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import signal
import sys
from contextlib import suppress
from typing import Any, BinaryIO

import httpx

from omnifleet.environments.codec import frame, order_from_json, played_to_json, read_frame
from omnifleet.environments.environment import Environment, load_environment
from omnifleet.environments.outcome import Crashed, Lost
from omnifleet.environments.play import Played, play
from omnifleet.errors import OmnifleetError

_PULSE_S = 0.5
_PR_SET_PDEATHSIG = 1


class Stage:
    """Plays what it is told to."""

    def __init__(self, environments: dict[str, Environment], http: httpx.AsyncClient, out: BinaryIO) -> None:
        self._environments, self._http, self._out = environments, http, out
        self._playing: dict[int, asyncio.Task[None]] = {}

    async def serve(self, incoming: asyncio.StreamReader) -> None:
        """Until the pool hangs up."""
        pulse = asyncio.create_task(self._pulse())
        try:
            while True:
                request = await read_frame(incoming)
                if "cancel" in request:
                    if (task := self._playing.get(request["cancel"])) is not None:
                        task.cancel()
                    continue
                number = int(request["play"])
                self._playing[number] = asyncio.create_task(self._play(number, request["order"]))
        except asyncio.IncompleteReadError:
            return
        finally:
            pulse.cancel()
            for task in self._playing.values():
                task.cancel()

    async def _play(self, number: int, body: dict[str, Any]) -> None:
        try:
            order = order_from_json(body)
            self.send(
                self._answer(number, await play(self._environments[order.environment], order, self._http))
            )
        finally:
            del self._playing[number]

    @staticmethod
    def _answer(number: int, played: Played) -> bytes:
        try:
            return frame({"played": number, **played_to_json(played)})
        except OmnifleetError as error:
            return frame({"played": number, **played_to_json(Played(Lost(error)))})
        except (ValueError, TypeError) as error:
            return frame(
                {"played": number, **played_to_json(Played(Crashed(f"its outcome: {error}"[:2000])))}
            )

    async def _pulse(self) -> None:
        while True:
            self.send(frame({"pulse": len(self._playing)}))
            await asyncio.sleep(_PULSE_S)

    def send(self, data: bytes) -> None:
        """Write a frame. The pipe is read by a loop that does nothing slow."""
        self._out.write(data)
        self._out.flush()


async def _main(incoming_fd: int, outgoing: BinaryIO) -> None:
    incoming = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(incoming), os.fdopen(incoming_fd, "rb"))
    hello = (await read_frame(incoming))["hello"]
    try:
        environments = {
            name: load_environment(said["path"], said["params"])
            for name, said in hello["environments"].items()
        }
    except OmnifleetError as error:
        outgoing.write(frame({"failed": error.message}))
        outgoing.flush()
        return
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    headers = {"authorization": f"Bearer {hello['secret']}"} if hello["secret"] else {}
    async with httpx.AsyncClient(
        base_url=hello["gateway"], headers=headers, limits=limits, trust_env=False
    ) as http:
        stage = Stage(environments, http, outgoing)
        stage.send(frame({"ready": True}))
        await stage.serve(incoming)


def main() -> None:
    """Serve the pool that started this process; end with it."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(sys.argv[1]):
        return
    incoming, outgoing = os.dup(0), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # an environment that reads finds nothing, one that prints writes to the log
    os.dup2(2, 1)
    with suppress(KeyboardInterrupt):
        asyncio.run(_main(incoming, outgoing))


if __name__ == "__main__":
    main()
