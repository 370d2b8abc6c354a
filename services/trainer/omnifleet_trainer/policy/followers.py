"""The other processes of a policy of many ranks, as the first sees them: what they are told, what they answer, and that none
is lost unseen."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from typing import Any, BinaryIO, TypeVar

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.frames import receive, send
from omnifleet_trainer.policy.group import Place
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.nodes import Door, Meeting, Remote
from omnifleet_trainer.policy.peers import Agreed

log = logging.getLogger("omnifleet.trainer")
Value = TypeVar("Value")
_GRACE_S = 5.0


@dataclasses.dataclass(slots=True)
class Call:
    """One call that every follower makes. answers: by rank - 1."""

    id: int
    name: str
    answers: list[Future[str]]


class Followers:
    """Started here, or admitted from other nodes; ended by `kill`. Every call goes to all of them, in one order."""

    def __init__(
        self, job: Job, first: Place, *, tells_mismatches: bool, meeting: Meeting | None = None
    ) -> None:
        self._timeout_s = first.timeout_s
        self._ids, self._lock = itertools.count(), threading.Lock()
        self._calls: dict[int, Call] = {}
        self._lost: OmnifleetError | None = None
        self._busy = self.closed = False
        self._processes: list[subprocess.Popen[bytes] | Remote] = []
        self._door: Door | None = None
        for _ in range(1, first.per_node):
            self._processes.append(_start())
        if first.per_node < first.world:
            assert meeting is not None
            self._door = Door(meeting)
            ranks = range(first.per_node, first.world)
            try:
                found = self._door.admitted(ranks, first.timeout_s)
            except BaseException:
                self.kill()
                raise
            self._processes += [found[rank] for rank in ranks]
        for i in range(len(self._processes)):
            threading.Thread(target=self._listen, args=(i,), name=f"rank-{i + 1}", daemon=True).start()
        opening = {"job": job.to_json(), "tells_mismatches": tells_mismatches}
        places = [
            {"place": dataclasses.asdict(dataclasses.replace(first, rank=rank))}
            for rank in range(1, first.world)
        ]
        self.opened = self._send("open", opening, places, [b""] * len(places))

    @property
    def whole(self) -> bool:
        """True while every follower is in step."""
        return self._lost is None and not self.closed

    def call(
        self,
        name: str,
        payloads: list[bytes] | None = None,
        own: Sequence[Mapping[str, Any]] = (),
        **arguments: Any,
    ) -> Call:
        """Tell every follower to make a call; own: arguments of each. Raises what the world is broken by."""
        if self._lost is not None:
            raise self._lost
        count = len(self._processes)
        return self._send(name, arguments, list(own) or [{}] * count, payloads or [b""] * count)

    def told(self, name: str, own: Sequence[Mapping[str, Any]], timeout_s: float) -> list[str]:
        """Have every follower make a call that the first rank has no part in; what they say of it.

        Raises DEADLINE, which leaves the world as it is, and what it is broken by.
        """
        call, deadline = self.call(name, own=own), time.monotonic() + timeout_s
        try:
            return [answer.result(max(deadline - time.monotonic(), 0.0)) for answer in call.answers]
        except FutureTimeout:
            raise OmnifleetError(
                Reason.DEADLINE, f"the other ranks did not end {name} in {timeout_s:g} s", retryable=True
            ) from None
        finally:
            with self._lock:
                self._calls.pop(call.id, None)

    def along(self, call: Call, own: Callable[[], Value]) -> Value:
        """This rank's part of a call, then the others' answers."""
        try:
            result = self.guarded(own)
        except Agreed:
            self.settle(call)
            raise
        self.settle(call)
        return result

    def guarded(self, own: Callable[[], Value]) -> Value:
        """This rank's part. If it fails the world is broken; a lost follower is then named as the cause."""
        self._busy = True
        try:
            return own()
        except Agreed:
            raise
        except BaseException as error:
            self._await_loss()
            if self._lost is not None and not _earlier(error):
                raise self._lost from error
            self._lose(OmnifleetError(Reason.UNAVAILABLE, f"the first rank failed: {error}", retryable=True))
            raise
        finally:
            self._busy = False

    def settle(self, call: Call) -> None:
        """Wait for the answers to a call. Raises what a follower failed with; what all refused alike is not repeated."""
        deadline = time.monotonic() + self._timeout_s
        for rank, answer in enumerate(call.answers, 1):
            try:
                answer.result(max(deadline - time.monotonic(), 0.0))
            except FutureTimeout:
                self._lose(
                    OmnifleetError(
                        Reason.UNAVAILABLE,
                        f"rank {rank} did not end {call.name} within {self._timeout_s:g} s of the first rank",
                        retryable=True,
                        knob="trainer.parallel.timeout_s",
                    )
                )
                assert self._lost is not None
                raise self._lost from None
        with self._lock:
            self._calls.pop(call.id, None)

    def kill(self, after_s: float = 0.0) -> None:
        """End the followers, those first that go by themselves within `after_s`."""
        self.closed = True
        deadline = time.monotonic() + after_s
        for process in self._processes:
            try:
                process.wait(max(deadline - time.monotonic(), 0.0))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            for stream in (process.stdin, process.stdout):
                if stream is not None:
                    try:
                        stream.close()
                    except OSError:  # what was never read by the one who died
                        log.debug("a pipe to a rank that is gone had bytes left")
        if self._door is not None:
            self._door.close()

    def _send(
        self, name: str, shared: dict[str, Any], own: Sequence[Mapping[str, Any]], payloads: list[bytes]
    ) -> Call:
        with self._lock:
            call = Call(next(self._ids), name, [Future() for _ in self._processes])
            self._calls[call.id] = call
            for i, process in enumerate(self._processes):
                assert process.stdin is not None
                body = {"id": call.id, "call": name} | shared | dict(own[i])
                try:
                    send(process.stdin, body, payloads[i])  # type: ignore[arg-type]
                except OSError:
                    log.debug("rank %d is gone; its listener says how", i + 1)
        return call

    def _listen(self, i: int) -> None:
        """Answers of one follower until it goes; then the world is broken, unless it is closed."""
        process = self._processes[i]
        told = ""
        while (message := _next(process.stdout)) is not None:  # type: ignore[arg-type]
            body, _ = message
            if not body["sound"]:
                told = body["error"]["message"]
                continue
            with self._lock:
                call = self._calls.get(body["id"])
            if call is not None:
                call.answers[i].set_result(str(body["told"]))
        if isinstance(process, Remote):
            process.ended()
        status = process.wait()
        if not self.closed:
            why = told or f"it ended with status {status}"
            self._lose(
                OmnifleetError(
                    Reason.UNAVAILABLE, f"rank {i + 1} of the policy is lost: {why}", retryable=True
                )
            )

    def _lose(self, error: OmnifleetError) -> None:
        """The world is broken from now on: nobody waits for an answer any more, and nobody follows."""
        with self._lock:
            self._lost = self._lost or error
            waiting = [answer for call in self._calls.values() for answer in call.answers]
        for answer in waiting:
            if not answer.done():
                answer.set_exception(self._lost)
        for process in self._processes:
            process.kill()
        if self._door is not None:
            self._door.close()
        if self._busy and torch.cuda.is_available():
            threading.Thread(target=self._unblock, name="unblock", daemon=True).start()

    def _unblock(self) -> None:
        """NCCL does not see that a rank is gone; gloo does. Abort what this rank waits in."""
        time.sleep(_GRACE_S)
        if self._busy:
            from torch.distributed.distributed_c10d import _abort_process_group

            _abort_process_group()

    def _await_loss(self) -> None:
        """A rank that goes is felt in a collective before its end is seen: give that a moment."""
        deadline = time.monotonic() + _GRACE_S
        while self._lost is None and time.monotonic() < deadline:
            if all(process.poll() is None for process in self._processes):
                time.sleep(0.05)
            else:
                time.sleep(0.01)


def _earlier(error: BaseException) -> bool:
    """Whether this rank's own failure is the cause, not that another has gone."""
    return isinstance(error, OmnifleetError | KeyboardInterrupt | MemoryError)


def _next(stream: BinaryIO) -> tuple[dict[str, Any], bytes] | None:
    """The next answer; None if whoever gave them is gone."""
    try:
        return receive(stream)
    except OSError:
        return None


def _start() -> subprocess.Popen[bytes]:
    command = [sys.executable, "-m", "omnifleet_trainer.policy.follower", str(os.getpid())]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
