"""A policy of many ranks: this process is the first, the others are processes that it starts and that end with it, or that
come from other nodes (nodes.py).

Ranks are equal: each builds the same backend and makes the same calls, and they meet inside them (torch.distributed).
The first tells the others which call comes next, and gives each the samples and pixels that it trains. When one is lost
the world is broken: the call in hand fails with a retryable error, so do all later ones, and whoever watches over the run
starts it again from its checkpoint.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.config.parallel import ParallelConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.shares import shard, shares, updates_of
from omnifleet_trainer.batch.wire import encode
from omnifleet_trainer.policy.folder import finish_folder
from omnifleet_trainer.policy.frames import receive, send
from omnifleet_trainer.policy.group import Place, rendezvous
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.policy.mismatch import OnMismatch
from omnifleet_trainer.policy.nodes import Door, Meeting, Remote
from omnifleet_trainer.policy.peers import Agreed
from omnifleet_trainer.policy.sharing import SharingFollowers

log = logging.getLogger("omnifleet.trainer")
Value = TypeVar("Value")
_LEAVE_S = 10.0
_GRACE_S = 5.0


class WorldPolicy:
    """`Policy` over `job.trainer.parallel.world` ranks. Raises what a rank raises, and OmnifleetError(UNAVAILABLE,
    retryable) once a rank is lost."""

    def __init__(
        self, job: Job, *, on_mismatch: OnMismatch | None = None, meeting: Meeting | None = None
    ) -> None:
        """meeting: needed where ranks live on several nodes."""
        self._job, self._parallel = job, job.trainer.parallel
        world, timeout_s = self._parallel.world, self._parallel.timeout_s
        host = "127.0.0.1"
        if self._parallel.nodes > 1:
            if meeting is None:
                raise invalid(
                    "a policy on several nodes needs a run's folder to meet in",
                    knob="trainer.parallel.nodes",
                    reason=Reason.INVALID_CONFIG,
                )
            host = meeting.address()
        store = rendezvous(world, host=host, timeout_s=timeout_s)
        first = Place(0, world, store.port, timeout_s, host, world // self._parallel.nodes)
        self._world = Followers(job, first, tells_mismatches=on_mismatch is not None, meeting=meeting)
        try:
            self._rank = self._world.along(
                self._world.opened, lambda: open_rank(job, first, store, on_mismatch)
            )
        except BaseException:
            self._world.kill()
            raise
        self.encoder_trains = self._rank.encoder_trains
        self.others = SharingFollowers(self._parallel.world - 1, self._world.told)
        """The other ranks, as senders of weights."""

    def describe(self) -> dict[str, str]:
        """See `Policy`."""
        return self._rank.describe()

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        return self._rank.trainable_names()

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`."""
        dealt = shares(batch, range(len(batch.samples)), self._parallel.dp)
        call = self._world.call("logprobs", payloads(batch, dealt, self._parallel))
        return self._world.along(call, lambda: self._rank.logprobs(batch))

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`."""
        dealt: list[list[int]] = [[] for _ in range(self._parallel.dp)]
        for update in updates_of(batch, self._job.trainer.batch_samples):
            for mine, rows in zip(dealt, shares(batch, update, self._parallel.dp), strict=True):
                mine += rows
        call = self._world.call("train", payloads(batch, dealt, self._parallel))
        return self._world.along(call, lambda: self._rank.train(batch))

    def export(self, keep: Sequence[Collection[str]] = ()) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`. The ranks make each tensor whole together; one who stops early waits for the rest all the same.

        keep: of each other rank, names of tensors that it keeps a copy of, to send them.
        """
        call = self._world.call("export", own=[{"keep": sorted(names)} for names in keep])
        tensors = self._rank.export()
        try:
            while (item := self._world.guarded(lambda: next(tensors, None))) is not None:
                yield item
        finally:
            self._world.along(call, lambda: [None for _ in tensors])

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`; each rank copies and writes its share of the tensors."""
        call = self._world.call("snapshot")
        own = self._world.along(call, self._rank.snapshot)

        def write(folder: Path) -> None:
            writing = self._world.call("write", snapshot=call.id, folder=str(folder))
            own(folder)
            self._world.settle(writing)
            finish_folder(folder / "policy", self._job.source)

        return write

    def save(self, folder: Path) -> None:
        """See `Policy`."""
        self.snapshot()(folder)

    def load(self, folder: Path) -> None:
        """See `Policy`; of however many ranks the folder is."""
        call = self._world.call("load", folder=str(folder))
        self._world.along(call, lambda: self._rank.load(folder))

    def offload(self) -> None:
        """See `Policy`."""
        self._world.along(self._world.call("offload"), self._rank.offload)

    def onload(self) -> None:
        """See `Policy`."""
        self._world.along(self._world.call("onload"), self._rank.onload)

    def close(self) -> None:
        """See `Policy`."""
        if self._world.closed:
            return
        try:
            if self._world.whole:
                self._world.along(self._world.call("close"), self._rank.close)
            else:
                self._rank.close()
        except (OmnifleetError, RuntimeError) as error:
            log.warning("the policy's ranks did not part in order: %s", error)
        finally:
            self._world.kill(after_s=_LEAVE_S if self._world.whole else 0.0)


def payloads(batch: StepBatch, dealt: list[list[int]], parallel: ParallelConfig) -> list[bytes]:
    """The step of each follower, by rank - 1. dealt: rows of each data rank; ranks that share it get the same."""
    of = [parallel.data_rank(rank) for rank in range(1, parallel.world)]
    parts = {i: encode(shard(batch, dealt[i])) for i in set(of)}
    return [parts[i] for i in of]


@dataclasses.dataclass(slots=True)
class Call:
    """One call that every follower makes. answers: by rank - 1."""

    id: int
    name: str
    answers: list[Future[str]]


class Followers:
    """The other processes: what they are told, what they answer, and that none is lost unseen."""

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
