"""One scorer process: reads items, runs scorers on its main thread, answers. `python -m omnifleet_reward.process`.

A scorer may hang, eat memory, print, or end the process; whoever started this process sees to the consequences.
"""

from __future__ import annotations

import argparse
import ctypes
import math
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any, BinaryIO

from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_reward import frames
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict

READY = {"ready": True}
_PR_SET_PDEATHSIG = 1


def main() -> None:
    """Serve items from stdin until it ends."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--parent", type=int, required=True)
    parser.add_argument("--memory-bytes", type=int, required=True)
    parser.add_argument("--module", action="append", default=[])
    arguments = parser.parse_args()
    _die_with(arguments.parent)
    incoming, outgoing = _take_pipes()
    registry = Registry(arguments.module)
    _limit_memory(arguments.memory_bytes)
    _send(outgoing, READY)
    while (request := frames.read_blocking(incoming)) is not None:
        answer = _answer(registry, request)
        _send(outgoing, answer)
        if answer.get("spent"):
            return


def _answer(registry: Registry, request: dict[str, Any]) -> dict[str, Any]:
    """Verdicts of one item, in the order of its terms, or why there are none."""
    label = "(none)"
    try:
        reply = Reply(**request["reply"] | {"media": tuple(request["reply"]["media"])})
        reward = registry.reward([ScorerConfig(**term) for term in request["terms"]])
        verdicts = []
        for term in reward.terms:
            label = term.scorer.label
            verdicts.append(_checked(term.scorer.judge(reply, term.params)))
        return {"verdicts": [[verdict.score, verdict.correct] for verdict in verdicts]}
    except MemoryError:
        message = f"scorer {label} needs more memory than one item may take"
        return _failure(Reason.LIMIT_EXCEEDED, message, knob="reward_service.item_memory_bytes") | {
            "spent": True
        }
    except OmnifleetError as error:
        return _failure(error.reason, f"scorer {label}: {error.message}", knob=error.knob)
    except Exception as error:  # noqa: BLE001 - a scorer may raise anything; the item says what
        return _failure(Reason.INTERNAL, f"scorer {label} raised {type(error).__name__}: {error}"[:2000])


def _checked(verdict: Verdict) -> Verdict:
    if not isinstance(verdict.score, int | float) or not math.isfinite(verdict.score):
        raise ValueError(f"score is a finite number, not {verdict.score!r}")
    if verdict.correct is not None and not isinstance(verdict.correct, bool):
        raise ValueError(f"correct is true, false or none, not {verdict.correct!r}")
    return verdict


def _failure(reason: Reason, message: str, *, knob: str = "") -> dict[str, Any]:
    return {"error": {"reason": reason, "message": message, "knob": knob}}


def _send(stream: BinaryIO, document: dict[str, Any]) -> None:
    stream.write(frames.encode(document))
    stream.flush()


def _take_pipes() -> tuple[BinaryIO, BinaryIO]:
    """Keep the pipes for frames: a scorer that prints writes to stderr, one that reads stdin finds it empty."""
    incoming, outgoing = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.dup2(2, 1)
    os.close(nothing)
    return incoming, outgoing


def _limit_memory(added: int) -> None:
    """Let the address space grow by `added` bytes over what it is now."""
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + added
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def _die_with(parent: int) -> None:
    """End when the service ends, even by kill -9 while a scorer hangs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)


if __name__ == "__main__":
    main()
