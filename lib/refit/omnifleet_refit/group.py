"""A process group between one sender and the ranks of its receivers: NCCL on CUDA, gloo on CPU, one shape.

Nothing of torch's global process group is used, so vLLM's own groups are not touched. One store for the sender's life
listens on a port that the kernel chose and that is never given back in between; each membership meets under a name of
its own, so no port is probed, released or used twice. Whoever can't go on aborts, which ends the waiting of all.
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.distributed_c10d import PrefixStore, Store

from omnifleet.errors import Reason, retryable

SENDER = 0
_LOOK_S = 0.0005
_MEET_LOOK_S = 0.005
_CALL_OFF_S = 5.0
_DECISION, _GO, _OFF = "decision", "go", "off"
"""Whether a meeting comes about is decided once, by who writes first: all go and connect, or nobody does."""
_ABANDONED: list[tuple[Any, Any]] = []
"""Groups with an operation that still waits for a peer, until it runs into its timeout."""


class Meeting:
    """Where groups meet. host: the address that receivers reach us at."""

    def __init__(self, host: str) -> None:
        """Listen. Raises UNAVAILABLE if no port can be had."""
        self.host = host
        listener = socket.create_server(("", 0))
        self.port = int(listener.getsockname()[1])
        try:
            self._store = TCPStore(
                "127.0.0.1",
                self.port,
                is_master=True,
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
            )
        except dist.DistError as error:
            raise retryable(Reason.UNAVAILABLE, f"no store on port {self.port}: {error}") from error

    def open_group(self, name: str, size: int, device: torch.device, timeout_s: float) -> Group:
        """Meet `size` - 1 receivers under `name`. Blocks. Raises UNAVAILABLE if they don't come in time."""
        return Group(PrefixStore(name, self._store), SENDER, size, device, timeout_s)

    def call_off(self, name: str) -> None:
        """Nobody waits for the group of this name any more."""
        PrefixStore(name, self._store).compare_set(_DECISION, "", _OFF)

    @staticmethod
    def new_name() -> str:
        """For a membership: never the same again."""
        return secrets.token_hex(8)


def own_address() -> str:
    """This host's address by its own name; the loopback if it has none."""
    try:
        return socket.gethostbyname(socket.gethostname())
    except OSError:
        return "127.0.0.1"


class Group:
    """Broadcasts from the sender to all others. Not thread-safe, but for `abort`."""

    def __init__(self, store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> None:
        """Meet all ranks at the store, then connect. Raises UNAVAILABLE if they don't come within `timeout_s`."""
        self._device = device
        self._aborted = False
        self._store, self._rank, self._size, self._rounds = store, rank, size, 0
        try:
            _meet(store, rank, size, timeout_s)
            self._backend = _backend(store, rank, size, device, timedelta(seconds=timeout_s))
        except RuntimeError as error:
            raise retryable(Reason.UNAVAILABLE, f"rank {rank} did not meet all {size}: {error}") from error
        self._stream = _new_stream(device)

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Work inside is ordered with the broadcasts; the device's other work goes on beside it.

        The sender's comes after what the device was given before: what it sends must be packed. A receiver waits for
        nothing, since its buffers are its own and the engine beside it must not be waited for.
        """
        if self._stream is None:
            yield
            return
        with torch.cuda.device(self._device):
            if self._rank == SENDER:
                self._stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self._stream):
                yield

    def say_ready(self) -> None:
        """Of a receiver, for the next round: our buffers are there."""
        self._rounds += 1
        self._store.set(f"ready/{self._rounds}/{self._rank}", "1")

    def await_ready(self, deadline: float) -> None:
        """Of the sender: wait until all receivers of the next round have said so. Raises UNAVAILABLE, DEADLINE."""
        self._rounds += 1
        keys = [f"ready/{self._rounds}/{rank}" for rank in range(1, self._size)]
        with self._failures(deadline):
            while not self._store.check(keys):
                self._look(deadline)

    def broadcast(self, bucket: torch.Tensor, deadline: float) -> None:
        """Send or receive one bucket; on CUDA it is only queued. deadline: monotonic s. Raises UNAVAILABLE, DEADLINE."""
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor, options.asyncOp = SENDER, 0, True
        with self._failures(deadline):
            if self._aborted:  # NCCL would connect anew, to nobody
                raise RuntimeError("aborted")
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


def call_off(host: str, port: int, names: Sequence[str]) -> None:
    """Nobody waits for these groups any more, which meet at host:port. Does nothing if nobody is there."""
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=_CALL_OFF_S))
        for name in names:
            PrefixStore(name, store).compare_set(_DECISION, "", _OFF)
    except dist.DistError:
        return


def join(
    host: str, port: int, name: str, *, rank: int, size: int, device: torch.device, timeout_s: float
) -> Group:
    """Take a place in the group that meets as `name` at the sender's host:port; rank SENDER is another sender's. Blocks.

    Raises UNAVAILABLE.
    """
    try:
        store = TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except dist.DistError as error:
        raise retryable(Reason.UNAVAILABLE, f"the sender at {host}:{port} is gone: {error}") from error
    return Group(PrefixStore(name, store), rank, size, device, timeout_s)


def _meet(store: Store, rank: int, size: int, timeout_s: float) -> None:
    """Wait until all are at the store. Raises RuntimeError if they don't come in time, or the meeting is called off.

    Whoever goes on to connect waits for all others there, and nothing interrupts that: so all go, or nobody.
    """
    deadline = time.monotonic() + timeout_s
    store.set(f"here/{rank}", "1")
    while not store.check([_DECISION]):
        if time.monotonic() > deadline:
            store.compare_set(_DECISION, "", _OFF)
        elif rank == SENDER and store.check([f"here/{other}" for other in range(size)]):
            store.compare_set(_DECISION, "", _GO)
        else:
            time.sleep(_MEET_LOOK_S)
    if store.get(_DECISION) != _GO.encode():
        raise RuntimeError("called off, or not in time")


def _new_stream(device: torch.device) -> torch.cuda.Stream | None:
    return torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _backend(store: Store, rank: int, size: int, device: torch.device, timeout: timedelta) -> Any:
    if device.type != "cuda":
        return dist.ProcessGroupGloo(store, rank, size, timeout=timeout)
    # Else buckets queue behind the engine's kernels.
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
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
