"""Receivers and senders of `refit_world` in processes of their own, to be stopped and killed."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from omnifleet.auth import Scope, Tokens
from omnifleet.client.refit import RefitClient
from omnifleet.config.services import RolloutConfig
from omnifleet.types import InFlight
from omnifleet.wire.server import serving
from omnifleet_refit import group as group_module
from omnifleet_rollout.refit import collective as collective_module
from omnifleet_rollout.worker.catchup import CatchUp
from omnifleet_rollout.worker.command import Worker
from omnifleet_rollout.worker.membership import Member
from tests import refit_model
from tests.refit_model import HIDDEN
from tests.refit_world import DEADLINE_S, Receiving, Remote, Sender, SmallEngine, receiving


def forkserver() -> Any:
    """Children that are forked from a server which has imported torch, so that each starts at once.

    Recording a plan imports sympy and torch._dynamo, which take their time too. There is one server for all tests, as the first
    one asks for it.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, "sympy", "torch._dynamo"])
    return context


class Deaf:
    """A gloo group that behaves as NCCL's do: nobody feels a member's death, what waits for it never ends."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> DeafWork:
        return DeafWork(self._backend.broadcast(tensors, options))

    def abort(self) -> None:
        self._backend.abort()


class DeafWork:
    """An operation that is done when it went well, and else is never done."""

    def __init__(self, work: Any) -> None:
        self._work, self._failed = work, False

    def is_completed(self) -> bool:
        if not self._failed and self._work.is_completed():
            try:
                self._work.wait()
                return True
            except RuntimeError:
                self._failed = True
        return False

    def wait(self) -> None:
        pass


def deafen(patch: Callable[[object, str, object], None] = setattr) -> None:
    """All groups of this process that are made from now on are deaf."""
    make = group_module._backend
    patch(group_module, "_backend", lambda *told: Deaf(make(*told)))


def settle(deaf: bool, hidden: int, patch: Callable[[object, str, object], None] = setattr) -> None:
    """How the groups of this process behave from now on, and how wide its model is."""
    patch(refit_model, "HIDDEN", hidden)
    if deaf:
        deafen(patch)


def own(device: str) -> torch.device:
    """The device; a GPU is the only one that this process sees from now on, as an engine's process sees its own alone."""
    kind, _, number = device.partition(":")
    if kind != "cuda":
        return torch.device(device)
    seen = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = seen.split(",")[int(number)] if seen else number
    return torch.device("cuda", 0)


def run_receiver(
    checkpoint: str,
    name: str,
    pipe: Any,
    deaf: bool = False,
    hidden: int = HIDDEN,
    ranks: Sequence[tuple[int, int]] = ((0, 2),),
    device: str = "cpu",
    shadow: int | None = None,
) -> None:
    """The process of a `Remote`: says its address, then answers each message with (fenced, version, whole).

    After "stop at commit" it says so when the next commit is in its gate, and goes no further until "go on". After
    "stop at join" it says so when the next stage is about to meet its group, and never goes further. shadow: bytes that it may
    take for one; None: all there is.
    """
    settle(deaf, hidden)
    place, gone_on = own(device), asyncio.Event()

    async def stop() -> None:
        pipe.send("in its gate")
        await gone_on.wait()

    def stay_out(*told: Any, **more: Any) -> Any:
        pipe.send("at the door")
        threading.Event().wait()

    async def serve() -> None:
        async with receiving(Path(checkpoint), 1, ranks=ranks, device=place) as (worker,):
            worker.engine.limit_shadow(shadow)
            pipe.send(worker.address)
            while message := await asyncio.to_thread(pipe.recv):
                if message == "stop at commit":
                    gone_on.clear()
                    worker.engine.at_commit = stop
                elif message == "stop at join":
                    collective_module.join = stay_out
                elif message == "go on":
                    worker.engine.at_commit = None
                    gone_on.set()
                pipe.send((worker.fenced, worker.version.number, worker.whole()))

    asyncio.run(serve())


@asynccontextmanager
async def joined(
    checkpoint: Path,
    name: str,
    gateway: str,
    tokens: Tokens,
    *,
    planned: bool = False,
    spoiled: set[int] | None = None,
) -> AsyncIterator[Receiving]:
    """A whole worker, member of the fleet of a gateway, that catches up by itself after a fifth of a second."""

    async def find_gateway() -> str:
        return gateway

    engine = SmallEngine(checkpoint, planned=planned)
    engine.spoiled = spoiled or set()
    await engine.start()
    worker = Worker(engine, name, RolloutConfig(), tokens)
    secret = tokens.secret(Scope.SERVICE)
    async with serving("127.0.0.1:0", worker.register, tokens=tokens, knob="test", grace_s=0) as address:
        member = Member(
            engine,
            worker.standing,
            worker.counters,
            find_gateway=find_gateway,
            secret=secret,
            address=address,
            pool="default",
        )
        following = CatchUp(
            engine,
            worker.receiver,
            worker.standing,
            worker.counters,
            find_gateway=find_gateway,
            target=lambda: member.target,
            secret=secret,
            pool="default",
            patience_s=0.2,
            policy=InFlight.KEEP,
        )
        tasks = [asyncio.create_task(member.run()), asyncio.create_task(following.run())]
        try:
            yield Receiving(
                worker.standing.worker, engine, worker.gate, worker.receiver, address, worker.counters
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def run_worker(
    checkpoint: str, name: str, gateway: str, tokens: Tokens, spoiled: set[int], pipe: Any
) -> None:
    """The process of a `joined` worker: says its id, then answers as `run_receiver`'s does."""

    async def serve() -> None:
        async with joined(Path(checkpoint), name, gateway, tokens, planned=True, spoiled=spoiled) as worker:
            pipe.send(worker.id)
            while await asyncio.to_thread(pipe.recv):
                pipe.send((worker.fenced, worker.version.number, worker.whole()))

    asyncio.run(serve())


def run_sender(
    addresses: dict[str, str],
    step: int,
    phase: str,
    pipe: Any,
    deaf: bool = False,
    hidden: int = HIDDEN,
    device: str = "cpu",
    deadline_s: float = DEADLINE_S,
    in_place: bool = False,
) -> None:
    """A sender that publishes step 0 whole, then `step`, and says `phase` when it is there; it goes on when it is told to.

    deadline_s: of the second stage. in_place: straight into place for who has no room.
    """
    settle(deaf, hidden)

    def reached(now: str) -> None:
        if now == phase:
            pipe.send(now)
            pipe.recv()

    class Slow(list[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, bucket in enumerate(super().__iter__()):
                if number == 0:
                    reached("opened")
                if number == len(self) - 1:
                    reached("broadcast")
                yield bucket

    async def send() -> None:
        async with AsyncExitStack() as stack:
            clients = {
                id: await stack.enter_async_context(RefitClient.open(a)) for id, a in addresses.items()
            }
            workers = [Remote(id, None, client) for id, client in clients.items()]
            sender = Sender(f"killed {phase}", torch.device(device))
            sender.in_place = InFlight.KEEP if in_place else None
            await sender.publish(workers, 0)
            shipment = sender.pack(step, whole=True)
            reached("packed")
            outcomes = await sender.stage(workers, shipment, Slow(sender.buckets(shipment)), deadline_s)
            reached("staged")
            for worker in workers:
                await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
                reached("committed one")

    asyncio.run(send())
