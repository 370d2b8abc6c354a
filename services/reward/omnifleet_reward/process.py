"""One scorer process: reads items, runs scorers on its main thread, answers. `python -m omnifleet_reward.process`.

A scorer may hang, eat memory, print, or end the process; whoever started this process sees to the consequences.

Requests: {"prepare": [[name, version], ...]} → {"prepared": true}; {"reply", "terms"} → {"verdicts"} or {"error"}. Before a scorer
that may go beyond its limits an interim answer says what is known so far: {"verdicts", "more": true}. Every answer
tells the CPU seconds of this process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Mark
from omnifleet_reward import frames
from omnifleet_reward.combine import Reward
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict

_PR_SET_PDEATHSIG = 1
_REWARDS_KEPT = 256
_KINDS = (Mark.SCORED, Mark.UNPARSEABLE)

Send = Callable[[dict[str, Any]], None]


def main() -> None:
    """Serve items from stdin until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--module", action="append", default=[])
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    incoming, outgoing = _take_pipes()

    def send(answer: dict[str, Any]) -> None:
        outgoing.write(frames.encode(answer | {"cpu_s": time.process_time()}))
        outgoing.flush()

    desk = _Desk(Registry(arguments.module), arguments.memory_bytes, send)
    send({"ready": True})
    while (request := frames.read_blocking(incoming)) is not None:
        answer = desk.answer(request)
        send(answer)
        if answer.get("spent"):
            return


class _Desk:
    """Answers requests, one after the other."""

    def __init__(self, registry: Registry, memory_bytes: int, send: Send) -> None:
        self._registry = registry
        self._memory_bytes = memory_bytes
        self._send = send
        self._rewards: dict[str, Reward] = {}
        self._first_bytes = _address_space()

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        """The final answer to a request."""
        if "prepare" in request:
            for name, version in request["prepare"]:
                prepare = self._registry.find(name, version).prepare
                if prepare is not None:
                    prepare()
            self._first_bytes = _address_space()
            return {"prepared": True}
        held = _address_space()
        _limit_memory(held + self._memory_bytes)
        answer = self._judge(request)
        if held - self._first_bytes > self._memory_bytes:  # items left much behind: start afresh
            answer["spent"] = True
        return answer

    def _judge(self, request: dict[str, Any]) -> dict[str, Any]:
        """Verdicts of one item, in the order of its terms, or why there are none."""
        label = "(none)"
        verdicts: list[list[Any]] = []
        try:
            reply = Reply(**request["reply"] | {"media": tuple(request["reply"]["media"])})
            for term in self._reward(request["terms"]).terms:
                label = term.scorer.label
                if term.scorer.beyond is not None:
                    self._send({"verdicts": verdicts, "more": True})
                assert term.scorer.judge is not None
                verdict = _checked(term.scorer.judge(reply, term.params))
                verdicts.append([verdict.score, verdict.correct, verdict.mark])
            return {"verdicts": verdicts}
        except MemoryError:
            message = f"scorer {label} needs more memory than one item may take"
            failure = _failure(Reason.LIMIT_EXCEEDED, message, knob="reward_service.item_memory_bytes")
            return failure | {"spent": True}
        except OmnifleetError as error:
            return _failure(error.reason, f"scorer {label}: {error.message}", knob=error.knob)
        except Exception as error:  # noqa: BLE001 - a scorer may raise anything; the item says what
            return _failure(Reason.INTERNAL, f"scorer {label} raised {type(error).__name__}: {error}"[:2000])

    def _reward(self, terms: str) -> Reward:
        """The scorers of a request, checked once."""
        reward = self._rewards.get(terms)
        if reward is None:
            if len(self._rewards) >= _REWARDS_KEPT:
                self._rewards.clear()
            reward = self._registry.reward([ScorerConfig(**term) for term in json.loads(terms)])
            self._rewards[terms] = reward
        return reward


def _checked(verdict: Verdict) -> Verdict:
    if not isinstance(verdict.score, int | float) or not math.isfinite(verdict.score):
        raise ValueError(f"score is a finite number, not {verdict.score!r}")
    if verdict.correct is not None and not isinstance(verdict.correct, bool):
        raise ValueError(f"correct is true, false or none, not {verdict.correct!r}")
    if verdict.mark not in _KINDS:
        raise ValueError(f"mark is scored or unparseable, not {verdict.mark!r}")
    return verdict


def _failure(reason: Reason, message: str, *, knob: str = "") -> dict[str, Any]:
    return {"error": {"reason": reason, "message": message, "knob": knob}}


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for frames: a scorer that prints writes to stderr, one that reads stdin finds it empty."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, outgoing


def _address_space() -> int:
    """Bytes of address space now."""
    return int(Path("/proc/self/statm").read_bytes().split()[0]) * resource.getpagesize()


def _limit_memory(limit: int) -> None:
    """Bound the address space; the hard limit stays, so that the next item can have a bound of its own."""
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard < 0 else min(limit, hard), hard))


def _die_with(parent: int) -> None:
    """End when the service ends, even by kill -9 while a scorer hangs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
