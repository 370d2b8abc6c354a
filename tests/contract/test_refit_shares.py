"""A trainer of three ranks: each sends the slices of its share of the tensors, and the weights are those of the whole path."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.config.recipe import ObjectiveConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import WeightVersion
from omnifleet_refit.group import Meeting
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.policy import followers as followers_module
from omnifleet_trainer.policy import world as world_module
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.world import WorldPolicy
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.share import Order, Share, deal
from omnifleet_trainer.server.refits import FleetRefits
from tests import refit_model
from tests.contract.share_follower import Steps
from tests.contract.test_refit_parts import HIDDEN, TWO, in_parts
from tests.refit_fleet import broadcasting
from tests.refit_model import MOVES, Tensors, tensors, write_checkpoint
from tests.refit_world import CPU, Sender, receiving
from tests.waiting import until

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit_model, "HIDDEN", HIDDEN)


class Threads:
    """The other ranks of a trainer, in threads: what `Others` is to the sender."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.shares = [Share(CPU) for _ in range(count)]
        self.sent: list[list[str]] = []
        self.broken = False

    def pack(self, weights: Tensors, kept: Sequence[set[str]]) -> None:
        for share, names in zip(self.shares, kept, strict=True) if kept else ():
            share.pack(iter(weights.items()), names)

    def send(self, orders: Sequence[Order | None], deadline_s: float) -> None:
        if self.broken:
            raise retryable(Reason.UNAVAILABLE, "a test said so")
        errors: list[OmnifleetError] = []

        def one(share: Share, order: Order) -> None:
            try:
                share.send(order)
            except OmnifleetError as error:
                errors.append(error)

        pairs = [(s, o) for s, o in zip(self.shares, orders, strict=True) if o is not None]
        threads = [threading.Thread(target=one, args=pair) for pair in pairs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if errors:
            raise errors[0]
        self.sent.append([s[0] for _, order in pairs for e in order["errands"] for s in e["part"]["slices"]])

    def stop(self) -> None:
        for share in self.shares:
            share.stop()


async def publish(sender: BroadcastSender, others: Threads, step: int) -> Any:
    others.pack(tensors(step), sender.share(others, MOVES))
    return await sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)


async def test_three_senders_give_every_rank_what_one_gives(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tmp_path / "c")
    async with (
        receiving(checkpoint, 3, ranks=TWO) as workers,
        receiving(checkpoint, 1, ranks=TWO) as (alone,),
        broadcasting(workers) as sender,
    ):
        others, one = Threads(2), Sender()
        for step in range(4):
            report = await publish(sender, others, step)
            assert report.ok == ("w0", "w1", "w2"), report.failed
            await one.publish([alone], step)
            assert all(worker.holds(step) for worker in [*workers, alone])
        assert len(others.sent) == 2, "the first went whole, the second told what the engines read"
        owners = deal({name: tensors(0)[name].nbytes for name in MOVES}, 3)
        theirs = {name for name, owner in owners.items() if owner}
        assert set(others.sent[-1]) == theirs and 0 < len(theirs) < len(MOVES)
        assert all(in_parts(worker) for worker in workers)
        for mine, other in zip(workers[0].engine.models, alone.engine.models, strict=True):
            for name, tensor in mine.state_dict().items():
                assert torch.equal(tensor.view(torch.uint8), other.state_dict()[name].view(torch.uint8)), name
        one.courier.close()
        others.stop()


async def test_a_sender_that_fails_costs_the_publish_and_the_first_one_sends_alone_to_who_is_behind(
    tmp_path: Path,
) -> None:
    async with (
        receiving(write_checkpoint(tmp_path / "c"), 2, ranks=TWO) as workers,
        broadcasting(workers) as sender,
    ):
        others = Threads(1)
        for step in range(3):
            assert not (await publish(sender, others, step)).failed
        others.broken = True
        report = await publish(sender, others, 3)
        assert sorted(report.failed) == ["w0", "w1"] and all(worker.holds(2) for worker in workers)
        keeping = asyncio.create_task(sender.keep_up())
        try:
            await until(lambda: all(worker.holds(3) for worker in workers))
        finally:
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)
        others.broken = False
        assert not (await publish(sender, others, 4)).failed and all(worker.holds(4) for worker in workers)
        others.stop()


def test_tensors_are_dealt_evenly_and_each_once() -> None:
    sizes = {f"t{i}": size for i, size in enumerate([100, 60, 50, 50, 30, 10, 10])}
    owners = deal(sizes, 3)
    loads = [sum(sizes[name] for name, owner in owners.items() if owner == rank) for rank in range(3)]
    assert owners.keys() == sizes.keys() and max(loads) - min(loads) <= 10
    assert deal(dict(reversed(sizes.items())), 3) == owners, "whatever order they come in"


@pytest.mark.soak
async def test_the_followers_of_a_world_send_their_shares_from_their_own_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-m", "tests.contract.share_follower", str(os.getpid())]
    start = partial(subprocess.Popen, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=ROOT)
    monkeypatch.setattr(followers_module, "_start", start)
    monkeypatch.setattr(world_module, "open_rank", lambda *told: Steps())
    parallel = {"dp": 3, "timeout_s": 120}
    trainer = TrainerConfig(parallel=parallel)  # type: ignore[arg-type]
    policy = await asyncio.to_thread(WorldPolicy, Job(tmp_path, trainer, ObjectiveConfig()))
    thread = ThreadPoolExecutor(1)
    try:
        async with receiving(write_checkpoint(tmp_path / "c"), 2, ranks=TWO) as workers:
            async with broadcasting(workers) as sender:
                refits = FleetRefits(sender, Weights(policy, run="r", lineage="l", step=0, thread=thread))
                sent = []
                for step in range(4):
                    metrics = await refits.publish(WeightVersion("r", "l", step))
                    assert metrics["refit_workers"] == 2 and not metrics["refit_failed"]
                    assert all(worker.holds(step) for worker in workers)
                    assert sender._current is not None
                    sent.append(sorted(set(sender._current.owners.values())))
                assert sent == [[], [], [0, 1, 2], [0, 1, 2]] and all(in_parts(worker) for worker in workers)
                await asyncio.to_thread(policy.others.stop)
                meeting = Meeting("127.0.0.1")
                meeting.call_off("m.0")
                errand = {"name": "m.0", "size": 2, "part": {"ranks": [0], "slices": [], "sizes": []}}
                order: dict[str, Any] = {
                    "host": meeting.host,
                    "port": meeting.port,
                    "membership": "m",
                    "deadline_s": 60.0,
                }
                with pytest.raises(OmnifleetError, match="rank 1 of the trainer did not send"):
                    await asyncio.to_thread(
                        policy.others.send, [order | {"errands": [errand]}, None], order["deadline_s"]
                    )
                assert not (await refits.publish(WeightVersion("r", "l", 4)))["refit_failed"]
                assert all(worker.holds(4) for worker in workers), "a share that was not sent breaks no world"
    finally:
        policy.close()
        thread.shutdown()
