"""A rank of a policy in a process of its own: makes the calls that the first rank makes, in the same order.

Commands come on stdin, answers go to what was stdout; libraries that print go to stderr. It ends with its parent, at the
end of its stdin, and after a call that failed: a rank that is out of step is of no use, and its going ends the waiting
of the others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from omnifleet.errors import OmnifleetError
from omnifleet_trainer.policy.frames import receive, send

_PR_SET_PDEATHSIG = 1
_SNAPSHOTS = 2  # one that is being written, one that was just taken


def main() -> int:
    """Serve one policy; the exit status."""
    parent = int(sys.argv[1])
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        return 1
    for name in (signal.SIGINT, signal.SIGTERM):  # the first rank says when to go
        signal.signal(name, signal.SIG_IGN)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    first = receive(sys.stdin.buffer)
    if first is None:
        return 1
    return Follower(answers).serve(first[0])


class Follower:
    """Commands to calls of the policy, one answer each: {"id", "error": None or its fields, "told": words for the first rank}."""

    def __init__(self, answers: BinaryIO) -> None:
        self._answers, self._lock = answers, threading.Lock()
        self._snapshots: dict[int, Callable[[Path], None]] = {}
        self._policy: Any = None
        self._sharing: Any = None

    def serve(self, opening: dict[str, Any]) -> int:
        """Build the policy, then follow until the stream ends."""
        from omnifleet_trainer.compat.quiet import quiet_libraries

        quiet_libraries()
        if not self._answered(opening["id"], lambda: self._open(opening)):
            return 1
        while (message := receive(sys.stdin.buffer)) is not None:
            body, payload = message
            if body["call"] == "write":
                write = self._snapshots.pop(body["snapshot"])
                folder = Path(body["folder"])
                threading.Thread(
                    target=self._answered, args=(body["id"], lambda w=write, f=folder: w(f)), daemon=True
                ).start()
            elif body["call"] == "send":
                self._sharing.send(body["order"], lambda told, id=body["id"]: self._answer(id, told=told))
            elif not self._answered(body["id"], lambda b=body, p=payload: self._call(b, p)):  # type: ignore[misc]
                return 1
            elif body["call"] == "close":
                return 0
        return 0

    def _open(self, body: dict[str, Any]) -> None:
        from omnifleet_trainer.policy.group import Place
        from omnifleet_trainer.policy.job import Job, open_rank
        from omnifleet_trainer.policy.sharing import SharingRank

        place = Place(**body["place"])
        unseen = (lambda *_: None) if body["tells_mismatches"] else None
        self._policy = open_rank(Job.of_json(body["job"]), place, on_mismatch=unseen)
        self._sharing = SharingRank()

    def _call(self, body: dict[str, Any], payload: bytes) -> None:
        from omnifleet_trainer.batch.wire import decode

        match body["call"]:
            case "train" | "logprobs" as name:
                getattr(self._policy, name)(decode(payload))
            case "export":
                self._sharing.export(self._policy.export(), body.get("keep", ()))
            case "stop":
                self._sharing.stop()
            case "snapshot":
                self._snapshots[body["id"]] = self._policy.snapshot()
                for old in sorted(self._snapshots)[:-_SNAPSHOTS]:
                    del self._snapshots[old]
            case "load":
                self._policy.load(Path(body["folder"]))
            case "offload" | "onload" | "close" as name:
                getattr(self._policy, name)()
            case other:
                raise ValueError(f"no call {other!r}")

    def _answered(self, id: int, call: Callable[[], None]) -> bool:
        """Call and answer; False if this rank is out of step now."""
        from omnifleet_trainer.policy.peers import Agreed

        error: dict[str, Any] | None = None
        sound = True
        try:
            call()
        except OmnifleetError as refusal:
            sound = isinstance(refusal, Agreed)
            error = {"reason": refusal.reason, "message": refusal.message, "knob": refusal.knob}
        except Exception as failure:  # noqa: BLE001 - told to the first rank, which ends the run with it
            sound = False
            error = {"reason": "internal", "message": f"{type(failure).__name__}: {failure}", "knob": ""}
        self._answer(id, error=error, sound=sound)
        return sound

    def _answer(
        self, id: int, *, error: dict[str, Any] | None = None, sound: bool = True, told: str = ""
    ) -> None:
        with self._lock:
            send(self._answers, {"id": id, "error": error, "sound": sound, "told": told})


if __name__ == "__main__":
    sys.exit(main())
