"""Environments in processes of their own: bounded, with deadlines; a process that dies or hangs is replaced.

Nobody can tell which of many episodes killed their process. Those that were in it are played again, one at a time in a process
alone: the guilty one then kills nobody else and ends as `Crashed`, the others go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from omnifleet.environments.codec import frame, order_to_json, played_from_json, read_frame
from omnifleet.environments.outcome import Crashed, TimedOut
from omnifleet.environments.play import Order, Played
from omnifleet.errors import OmnifleetError, Reason

log = logging.getLogger("omnifleet.environments")

_START_S = 120.0
_GRACE_S = 10.0
_READ_LIMIT = 1 << 20


@dataclass(frozen=True, slots=True)
class Cast:
    """What every process of a pool is told. environments: name -> (`module:Class`, params). gateway: http address."""

    environments: Mapping[str, tuple[str, Mapping[str, Any]]]
    gateway: str
    secret: str = ""

    def hello(self) -> bytes:
        """The first frame."""
        said = {
            name: {"path": path, "params": dict(params)} for name, (path, params) in self.environments.items()
        }
        return frame({"hello": {"environments": said, "gateway": self.gateway, "secret": self.secret}})


@dataclass(slots=True)
class PoolCounts:
    """episodes: ended, of any outcome. restarts: processes that died or hung."""

    episodes: int = 0
    restarts: int = 0


class _Died(Exception):
    """The process ended under an episode. alone: no other episode was in it. hung: it was killed for being silent."""

    def __init__(self, how: str, *, alone: bool) -> None:
        super().__init__(how)
        self.alone = alone


@dataclass(slots=True)
class _Process:
    """One child. Once `ended` is set it is of no more use."""

    child: asyncio.subprocess.Process
    hang_s: float
    waiting: dict[int, asyncio.Future[Played]] = field(default_factory=dict)
    ended: bool = False
    _reader: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, cast: Cast, hang_s: float) -> _Process:
        """Raises INVALID_CONFIG if an environment cannot be loaded, INTERNAL if the process does not come up."""
        pipe = asyncio.subprocess.PIPE
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        command = [sys.executable, "-m", "omnifleet.environments.process", str(os.getpid())]
        child = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, env=environment, limit=_READ_LIMIT, start_new_session=True
        )
        process = cls(child, hang_s)
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(cast.hello())
            async with asyncio.timeout(_START_S):
                said = await read_frame(child.stdout)
        except (TimeoutError, OSError, ValueError, EOFError) as error:
            await process.stop("it did not start")
            raise OmnifleetError(
                Reason.INTERNAL, f"a process of environments did not start: {type(error).__name__}"
            ) from error
        except asyncio.CancelledError:
            await process.stop("cancelled")
            raise
        if "ready" not in said:
            await process.stop("it refused")
            raise OmnifleetError(
                Reason.INVALID_CONFIG, str(said.get("failed")), knob="data.train.environment"
            )
        process._reader = asyncio.create_task(process._read())
        return process

    async def play(self, number: int, order: Order) -> Played:
        """Play one episode. Raises _Died."""
        assert self.child.stdin is not None
        future: asyncio.Future[Played] = asyncio.get_running_loop().create_future()
        self.waiting[number] = future
        try:
            self.child.stdin.write(frame({"play": number, "order": order_to_json(order)}))
            async with asyncio.timeout(order.timeout_s + _GRACE_S):
                return await asyncio.shield(future)
        except TimeoutError:  # it swallows its own cancellation
            await self.stop(f"an episode would not end after {order.timeout_s:g} s")
            return Played(TimedOut(order.timeout_s))
        finally:
            self.waiting.pop(number, None)
            if not future.done():
                future.cancel()
                with contextlib.suppress(OSError):
                    self.child.stdin.write(frame({"cancel": number}))
            elif not future.cancelled():
                future.exception()  # looked at: nobody else will

    async def _read(self) -> None:
        assert self.child.stdout is not None
        how = "its process ended"
        try:
            while True:
                async with asyncio.timeout(self.hang_s):
                    said = await read_frame(self.child.stdout)
                future = self.waiting.get(said.get("played", -1))
                if future is not None and not future.done():
                    future.set_result(played_from_json(said))
        except TimeoutError:
            how = f"it blocked its process for {self.hang_s:g} s"
        except asyncio.IncompleteReadError:
            pass
        except (OSError, ValueError) as error:
            how = f"its process spoke nonsense: {error}"[:300]
        await self.stop(how)

    async def stop(self, how: str) -> None:
        """Kill and reap; episodes in it end as _Died."""
        self.ended = True
        if self._reader is not None and self._reader is not asyncio.current_task():
            self._reader.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.child.pid, signal.SIGKILL)
        code = await self.child.wait()
        for future in self.waiting.values():
            if not future.done():
                future.set_exception(_Died(f"{how} ({_ending(code)})", alone=len(self.waiting) == 1))


class Pool:
    """Plays orders. Use as an async context manager."""

    def __init__(self, cast: Cast, *, processes: int, episodes: int, hang_s: float) -> None:
        """episodes: at once in one process; more wait. hang_s: silence after which a process counts as blocked."""
        self.counts = PoolCounts()
        self._cast, self._hang_s = cast, hang_s
        self._slots: list[_Process | None] = [None] * processes
        self._starting = [asyncio.Lock() for _ in range(processes)]
        self._room = asyncio.Semaphore(processes * episodes)
        self._alone = asyncio.Semaphore(1)
        self._numbers = itertools.count()
        self._load = [0] * processes

    async def __aenter__(self) -> Pool:
        """Start the first process: what cannot be loaded is said at once."""
        await self._process(0)
        return self

    async def __aexit__(self, *_: object) -> None:
        for process in self._slots:
            if process is not None:
                await process.stop("the pool was closed")

    async def play(self, order: Order) -> Played:
        """Play one episode; waits while the pool is full, before the episode's clock starts.

        Every end of an episode is an outcome. Raises INVALID_CONFIG and INTERNAL if no process can be started.
        """
        async with self._room:
            try:
                played = await self._play_among_others(order)
            except _Died as died:
                log.warning("episode %s: %s", order.identity.session, died)
                played = Played(Crashed(str(died))) if died.alone else await self._play_alone(order)
        self.counts.episodes += 1
        return played

    async def _play_among_others(self, order: Order) -> Played:
        slot = self._load.index(min(self._load))
        self._load[slot] += 1
        try:
            return await (await self._process(slot)).play(next(self._numbers), order)
        finally:
            self._load[slot] -= 1

    async def _play_alone(self, order: Order) -> Played:
        """Again, in another session of the gateway: the old one holds the turns of the first try."""
        again = replace(order, identity=replace(order.identity, session=f"{order.identity.session}/again"))
        async with self._alone:
            process = await _Process.start(self._cast, self._hang_s)
            try:
                return await process.play(next(self._numbers), again)
            except _Died as died:
                return Played(Crashed(str(died)))
            finally:
                await process.stop("its episode is over")

    async def _process(self, slot: int) -> _Process:
        async with self._starting[slot]:
            process = self._slots[slot]
            self.counts.restarts += process is not None and process.ended
            if process is None or process.ended:
                process = self._slots[slot] = await _Process.start(self._cast, self._hang_s)
            return process


def _ending(code: int) -> str:
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
