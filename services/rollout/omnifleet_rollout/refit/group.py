"""A process group between one sender and the ranks of its receivers: NCCL on CUDA, gloo on CPU, one shape.

Nothing of torch's global process group is used, so vLLM's own groups are not touched. A group is made for one
membership and remade for another; whoever can't go on aborts, which ends the waiting of all. The trainer has a twin.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import parse_qs, urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from omnifleet.errors import OmnifleetError, Reason, retryable

SENDER = 0
_LOOK_S = 0.0005
_MEET_LOOK_S = 0.005
CALLED_OFF = "off"
"""Key by which the sender ends a meeting that will not come about."""
_ABANDONED: list[tuple[Any, Any]] = []
"""Groups with an operation that still waits for a peer, until it runs into its timeout."""


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a group meets and which place is ours. name: unique for each membership. rank: of our first rank."""

    host: str
    port: int
    name: str
    rank: int
    size: int
    deadline_s: float

    @staticmethod
    def parse(source: str) -> Seat:
        """From "group://HOST:PORT/NAME?rank=1&size=3&deadline_s=20". Raises INVALID_REQUEST."""
        try:
            url = urlsplit(source)
            fields = {key: values[0] for key, values in parse_qs(url.query).items()}
            return Seat(
                str(url.hostname),
                int(url.port or 0),
                url.path.strip("/"),
                int(fields["rank"]),
                int(fields["size"]),
                float(fields["deadline_s"]),
            )
        except (ValueError, KeyError) as error:
            raise OmnifleetError(
                Reason.INVALID_REQUEST, f"{source} is not the address of a group: {error}"
            ) from error


class Group:
    """Broadcasts from the sender. Not thread-safe, but for `abort`."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Meet all ranks at the store, then connect. Raises UNAVAILABLE if they don't come in the store's time."""
        self._device = device
        self._events: list[Any] = []
        self._aborted = False
        self._store, self._rank, self._rounds = store, rank, 0
        try:
            _meet(store, rank, size, timeout_s)
            self._backend = _backend(store, rank, size, device, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise retryable(Reason.UNAVAILABLE, f"rank {rank} of {size} met nobody: {error}") from error
        self._stream = _new_stream(device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work inside is ordered with the broadcasts; the device's other work goes on beside it."""
        if self._stream is None:
            yield
        else:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                yield

    def say_ready(self) -> None:
        """Of the next round: our buffers are there. The sender sends nothing before all have said so."""
        self._rounds += 1
        self._store.set(f"ready/{self._rounds}/{self._rank}", "1")

    def broadcast(self, bucket: torch.Tensor, deadline: float) -> None:
        """Send or receive one bucket; on CUDA it is only queued. deadline: monotonic s. Raises UNAVAILABLE, DEADLINE."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = SENDER, 0, True
        with self._failures(deadline):
            work = self._backend.broadcast([bucket], options)
            if self._stream is None:
                self._see_through(work, deadline)
            work.wait()  # on CUDA the stream waits, not we

    def finish(self, deadline: float) -> None:
        """Wait until everything queued is done. Raises UNAVAILABLE if the group broke, DEADLINE; it is aborted then."""
        if self._stream is None:
            return
        done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        done.record(self._stream)
        with self._failures(deadline):
            while not done.query():  # type: ignore[no-untyped-call]
                self._look(deadline)
            if self._aborted:
                raise RuntimeError("aborted")

    def abort(self) -> None:
        """Break the group, from any thread. Idempotent."""
        if not self._aborted:
            self._aborted = True
            self._backend.abort()

    @property
    def broken(self) -> bool:
        """True once aborted."""
        return self._aborted

    def _see_through(self, work: Any, deadline: float) -> None:
        """Gloo neither ends an operation at an abort nor lets go of its group before: such a group is left to itself."""
        _ABANDONED[:] = [entry for entry in _ABANDONED if not entry[1].is_completed()]
        while not work.is_completed():
            try:
                self._look(deadline)
            except RuntimeError:
                _ABANDONED.append((self._backend, work))
                raise

    def _look(self, deadline: float) -> None:
        if self._aborted or time.monotonic() > deadline:
            raise RuntimeError("aborted" if self._aborted else "out of time")
        time.sleep(_LOOK_S)

    @contextmanager
    def _failures(self, deadline: float) -> Iterator[None]:
        try:
            yield
        except RuntimeError as error:
            late = time.monotonic() >= deadline and not self._aborted
            self.abort()
            raise retryable(
                Reason.DEADLINE if late else Reason.UNAVAILABLE, f"the refit's group broke: {error}"
            ) from error


def join(seat: Seat, offset: int, device: torch.device) -> Group:
    """Take a seat; `offset`: our rank within the engine. Raises UNAVAILABLE."""
    patience = timedelta(seconds=seat.deadline_s)
    try:
        store = TCPStore(seat.host, seat.port, is_master=False, timeout=patience)
    except dist.DistError as error:
        raise retryable(
            Reason.UNAVAILABLE, f"the sender at {seat.host}:{seat.port} is gone: {error}"
        ) from error
    return Group(PrefixStore(seat.name, store), seat.rank + offset, seat.size, device, seat.deadline_s)


def _meet(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all are at the store. Raises RuntimeError if they don't come in time, or the meeting is called off."""
    deadline = time.monotonic() + timeout_s
    store.set(f"here/{rank}", "1")
    while not store.check([f"here/{other}" for other in range(size)]):
        if store.check([CALLED_OFF]) or time.monotonic() > deadline:
            raise RuntimeError("called off, or not in time")
        time.sleep(_MEET_LOOK_S)


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _backend(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(minutes=10)
    with torch.cuda.device(device), _no_watchdog_kills():
        return dist.ProcessGroupNCCL(store, rank, size, options)


@contextmanager
def _no_watchdog_kills() -> Iterator[None]:
    """torch's watchdog would end the process when a collective fails; deadlines are ours. Read at construction only."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
