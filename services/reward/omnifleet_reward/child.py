"""A scorer process as the service sees it: started, asked one item at a time, killed with all that it started."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import sys
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Mark
from omnifleet_reward import frames
from omnifleet_reward.scorer import Verdict

Judged = list[Verdict] | OmnifleetError
Needs = tuple[str, str]
"""Name and version of a scorer that wants to be prepared."""

_START_S = 60.0
_CPU_SHARE = 0.25
"""A judgement is too hard if it had this share of its time on a CPU; with less, the machine was too busy to tell."""
_OWN_SIGNALS = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
"""Ends that a process brings on itself, e.g. by a stack that overflows."""
_TICKS = os.sysconf("SC_CLK_TCK")


class Child:
    """One process. After `judge` or `prepare` raised or `alive` is False it is of no more use; `stop` reaps it."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin is not None and process.stdout is not None
        self._process = process
        self._stdin, self._stdout = process.stdin, process.stdout
        self._prepared: set[Needs] = set()
        self._cpu_s = 0.0
        self._interim = False
        self._spent = False

    @classmethod
    async def start(cls, config: RewardConfig) -> Child:
        """A process that waits for items. Raises INTERNAL."""
        command = [sys.executable, "-m", "omnifleet_reward.process", "--parent", str(os.getpid())]
        command += ["--memory-bytes", str(config.item_memory_bytes)]
        for module in config.modules:
            command += ["--module", module]
        # What the service can import, its scorer processes can.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        pipe = asyncio.subprocess.PIPE
        child: Child | None = None
        try:
            child = cls(
                await asyncio.create_subprocess_exec(
                    *command, stdin=pipe, stdout=pipe, env=environment, start_new_session=True
                )
            )
            async with asyncio.timeout(_START_S):
                ready = await child._read()
        except (TimeoutError, OSError, ValueError, EOFError) as error:
            if child is not None:
                await child.stop()
            raise OmnifleetError(
                Reason.INTERNAL, f"a scorer process did not start: {type(error).__name__}"
            ) from error
        except asyncio.CancelledError:
            if child is not None:
                await child.stop()
            raise
        if not ready.get("ready"):
            await child.stop()
            raise OmnifleetError(Reason.INTERNAL, "a scorer process did not start: it spoke out of turn")
        return child

    @property
    def alive(self) -> bool:
        """True if the process can take an item."""
        return not self._spent and self._process.returncode is None

    async def prepare(self, needs: Sequence[Needs]) -> None:
        """Let the process import what these scorers need, if it has not. Raises INTERNAL."""
        missing = [need for need in needs if need not in self._prepared]
        if not missing:
            return
        try:
            async with asyncio.timeout(_START_S):
                self._stdin.write(frames.encode({"prepare": missing}))
                answer = await self._read()
        except (TimeoutError, OSError, ValueError, EOFError) as error:
            self._spent = True
            names = ", ".join(name for name, _ in missing)
            raise OmnifleetError(
                Reason.INTERNAL, f"a scorer process could not prepare {names}: {type(error).__name__}"
            ) from error
        if answer.get("prepared"):
            self._prepared.update(missing)

    async def judge(
        self, items: Sequence[bytes], timeout_s: float, beyond: Sequence[float | None]
    ) -> AsyncGenerator[Judged, None]:
        """Verdicts of each item, a term each, or its error: DEADLINE, INTERNAL (crash or a raising scorer), LIMIT_EXCEEDED.

        items: frames, sent ahead and judged one after the other, each with a clock of its own. Ends early where the process did:
        the items that have no answer yet were not begun. beyond: as in `Scorer`, by term.
        """
        self._stdin.write(b"".join(items))
        for _ in items:
            yield await self._next(timeout_s, beyond)
            if (
                self._spent
            ):  # not `alive`: a process may be dead already of an item whose turn to be read comes next
                return

    async def _next(self, timeout_s: float, beyond: Sequence[float | None]) -> Judged:
        known: list[Verdict] = []
        self._interim = False
        cpu_s = self._cpu_s
        try:
            async with asyncio.timeout(timeout_s):
                answer = await self._answer(known)
        except TimeoutError:
            used_s = self._cpu_now() - cpu_s
            await self.stop()
            if self._interim and used_s >= _CPU_SHARE * timeout_s:
                return _filled(known, beyond, Mark.TIMEOUT)
            return retryable(
                Reason.DEADLINE,
                f"scoring took longer than {timeout_s:g} s",
                knob="reward_service.item_timeout_s",
            )
        except (OSError, ValueError, EOFError):
            code = await self.stop()
            if self._interim and code is not None and -code in _OWN_SIGNALS:
                return _filled(known, beyond, Mark.CRASHED)
            return OmnifleetError(Reason.INTERNAL, f"the scorer ended its process ({_ending(code)})")
        except asyncio.CancelledError:
            await self.stop()
            raise
        self._spent = bool(answer.get("spent"))
        if "error" not in answer:
            return _verdicts(answer)
        told = answer["error"]
        if self._interim and told["reason"] == Reason.LIMIT_EXCEEDED and self._spent:
            return _filled(known, beyond, Mark.CRASHED)
        return OmnifleetError(Reason(told["reason"]), told["message"], knob=told["knob"])

    async def stop(self) -> int | None:
        """Kill the process group and reap the process; its exit code."""
        self._spent = True
        if self._process.returncode is None:
            # A child that is about to end by itself has an exit code worth telling.
            with contextlib.suppress(TimeoutError):
                if self._stdout.at_eof():
                    await asyncio.wait_for(self._process.wait(), 0.2)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        return await self._process.wait()

    async def _answer(self, known: list[Verdict]) -> dict[str, Any]:
        """The final answer; `known` becomes what interim answers say."""
        answer = await self._read()
        while answer.get("more"):
            self._interim = True
            known[:] = _verdicts(answer)
            answer = await self._read()
        return answer

    async def _read(self) -> dict[str, Any]:
        answer: dict[str, Any] = await frames.read(self._stdout)
        self._cpu_s = float(answer.get("cpu_s", self._cpu_s))
        return answer

    def _cpu_now(self) -> float:
        """CPU seconds of the process so far."""
        try:
            fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            return self._cpu_s
        return (int(fields[11]) + int(fields[12])) / _TICKS


def _verdicts(answer: dict[str, Any]) -> list[Verdict]:
    return [Verdict(score, correct, Mark(mark)) for score, correct, mark in answer["verdicts"]]


def _filled(known: Sequence[Verdict], beyond: Sequence[float | None], mark: Mark) -> list[Verdict]:
    """What is known, and for the terms that went beyond the limits, or were not reached, the score for that."""
    rest = [Verdict(score or 0.0, False, mark) for score in beyond[len(known) :]]
    return [*known, *rest]


def _ending(code: int | None) -> str:
    if code is None:
        return "unknown"
    return signal.Signals(-code).name if code < 0 else f"exit code {code}"
