"""A worker of three is killed each time the fleet is fully READY, five times, under load and refits: no request is lost.

Meanwhile new weights come every two seconds, to one worker after the other, so that the fleet never pauses as a whole. No
version is announced: a worker that starts serves the weights it began with until the next round comes to it.
"""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pytest

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, FleetView
from omnifleet.client.rollout import RolloutClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Sample, Sampling, WeightVersion, WorkerState
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import version_from_wire
from omnifleet.wire.errors import remote_errors
from omnifleet_rollout.engine.fake import fake_token
from tests.contract.test_worker_refit import write_transfer as write_fake
from tests.integration.live_worker import random_weights, write_transfer
from tests.integration.test_fleet_processes import PROMPT, RUN, WORKER, Run, running, seen

WORKERS, KILLS, REQUESTS = 3, 5, 64
EVERY_S = 2.0
Write = Callable[[Path, int], refit_pb2.Manifest]
"""Writes the transfer of one version's weights into a file."""
PROMISED = (Reason.WORKER_LOST, Reason.NO_WORKER, Reason.OVERLOADED, Reason.DEADLINE, Reason.UNAVAILABLE)
"""What docs/api promises to a caller whose reply cannot be finished: retryable, each."""


@dataclass
class Load:
    """Lanes that ask one request after the other. moved: replies that more than one worker made.

    crossed: replies of which one worker made some tokens before and some after a refit. versions: all that were named.
    """

    client: RolloutClient
    tokens: int
    asked: int = 0
    answered: int = 0
    moved: int = 0
    crossed: int = 0
    versions: set[WeightVersion | None] = field(default_factory=set)
    refused: Counter[Reason] = field(default_factory=Counter)

    async def lane(self, number: int, over: asyncio.Event, check: Callable[[int, Sample], None]) -> None:
        """Ask until it is over; each request ends complete, checked, or in a promised error."""
        while not over.is_set():
            self.asked += 1
            seed = 1000 * number + self.asked
            sampling = Sampling(max_tokens=self.tokens, seed=seed, ignore_eos=True)
            try:
                reply = await self.client.generate(
                    prompt_token_ids=PROMPT, sampling=sampling, identity=RUN, deadline_s=240
                )
            except OmnifleetError as error:
                self._refuse(error)
                continue
            for failure in reply.failures.values():
                assert isinstance(failure, OmnifleetError)
                self._refuse(failure)
            for sample in reply.samples.values():
                check(seed, sample)
                assert sample.spans[0].start == 0 and sample.spans[-1].end == len(sample.token_ids)
                pairs = list(pairwise(sample.spans))
                assert all(one.end == two.start for one, two in pairs)
                self.answered += 1
                self.moved += len({span.worker for span in sample.spans}) > 1
                self.crossed += any(one.worker == two.worker for one, two in pairs)
                self.versions |= {span.version for span in sample.spans}

    def _refuse(self, error: OmnifleetError) -> None:
        assert error.reason in PROMISED and error.retryable, error
        self.refused[error.reason] += 1


@dataclass
class Rolling:
    """Rounds of refits. made: the versions that some worker committed; cut: refits whose worker was killed in them.
    met: as many commits as there are workers."""

    fleet: FleetClient
    secret: str
    path: Path
    write: Write
    made: set[WeightVersion] = field(default_factory=set)
    commits: int = 0
    cut: int = 0
    met: asyncio.Event = field(default_factory=asyncio.Event)

    async def roll(self, over: asyncio.Event) -> None:
        """A round each EVERY_S until it is over."""
        number = 0
        while not over.is_set():
            number += 1
            manifest = await asyncio.to_thread(self.write, self.path, number)
            view = await seen(self.fleet, lambda _: True)
            for worker in view.workers:
                if worker.state is WorkerState.READY and not over.is_set():
                    await self._refit(worker.grpc_address, manifest)
            with suppress(TimeoutError):
                await asyncio.wait_for(over.wait(), EVERY_S)

    async def _refit(self, address: str, manifest: refit_pb2.Manifest) -> None:
        stage = refit_pb2.StageRequest(
            manifest=manifest, shm=refit_pb2.ShmTransport(path=str(self.path)), deadline_ms=60_000
        )
        async with open_channel(address, self.secret) as channel:
            stub = refit_pb2_grpc.RefitStub(channel)
            try:
                with remote_errors():
                    staged = await stub.Stage(stage, timeout=60)
                    commit = refit_pb2.CommitRequest(
                        manifest_digest=staged.manifest_digest,
                        in_flight=refit_pb2.RECOMPUTE,
                        deadline_ms=60_000,
                    )
                    done = await stub.Commit(commit, timeout=60)
            except OmnifleetError as error:
                assert error.reason is Reason.UNAVAILABLE, error
                self.cut += 1
                return
        self.commits += 1
        if self.commits >= WORKERS:
            self.met.set()
        self.made.add(version_from_wire(done.version))


def all_ready(view: FleetView) -> bool:
    return sum(worker.state is WorkerState.READY for worker in view.workers) == WORKERS


async def kill_five_times(
    run: Run, fleet: FleetClient, start: Callable[[str], Awaitable[object]]
) -> list[str]:
    """Kill the busiest worker of a whole fleet, start another, and again once all are READY. Names of the killed."""
    killed: list[str] = []
    for number in range(WORKERS, WORKERS + KILLS):
        view = await seen(fleet, all_ready)
        busiest = max((w for w in view.workers if w.state is WorkerState.READY), key=lambda w: w.running)
        name = busiest.id.rpartition("-")[0]
        await run.end(name, signal.SIGKILL)
        killed.append(name)
        await start(f"worker-{number}")
    await seen(fleet, all_ready)
    return killed


async def storm(
    path: Path,
    start: Callable[[Run], Callable[[str], Awaitable[object]]],
    check: Callable[[int, Sample], None],
    tokens: int,
    write: Write,
    shm: Path,
) -> Load:
    async with running(path) as run:
        gateway = await run.gateway()
        begin = start(run)
        await asyncio.gather(*(begin(f"worker-{i}") for i in range(WORKERS)))
        async with (
            FleetClient.open(gateway.grpc, run.tokens.secret(Scope.OPERATOR)) as fleet,
            RolloutClient.open(gateway.grpc, run.tokens.secret(Scope.TRAINER)) as client,
        ):
            await seen(fleet, all_ready)
            over, load = asyncio.Event(), Load(client, tokens)
            rolling = Rolling(fleet, run.tokens.secret(Scope.TRAINER), shm, write)
            async with asyncio.TaskGroup() as group:
                group.create_task(rolling.roll(over))
                for lane in range(REQUESTS):
                    group.create_task(load.lane(lane, over, check))
                killed = await kill_five_times(run, fleet, begin)
                await rolling.met.wait()  # a round that fails ends the group, and this wait
                over.set()
    print(
        f"killed {killed}: {load.asked} asked, {load.answered} answered, of which {load.moved} by more than one worker; "
        f"refused {dict(load.refused)}; {rolling.commits} refits, {rolling.cut} cut off by a kill, within {load.crossed} replies"
    )
    assert len(killed) == KILLS
    assert load.asked == load.answered + load.refused.total(), "each request ended one way or the other"
    assert load.moved > 0, "some were in the middle of a reply"
    assert load.crossed > 0 and load.versions & rolling.made, "the refits met replies"
    strangers = {v for v in load.versions - rolling.made if v is None or v.lineage != "base"}
    assert len(strangers) <= rolling.cut, "a refit may have been committed although its answer was cut off"
    return load


@pytest.mark.heavy
@pytest.mark.timeout(400)
async def test_five_kills_lose_no_request_and_no_token(tmp_path: Path, shm: Path) -> None:
    """Fake engines, whose tokens are known: a reply that moved is the one that a single worker would have made."""

    def check(seed: int, sample: Sample) -> None:
        assert sample.token_ids == [fake_token(PROMPT, seed, k) for k in range(100)]

    def start(run: Run) -> Callable[[str], Awaitable[object]]:
        return lambda name: run.worker(name, 0.03)

    # Three seconds a reply: its reader gets parts of it once a second, and what a killed worker made since is made again.
    load = await storm(tmp_path, start, check, 100, write_fake, shm)
    assert not load.refused, "two of three workers were there all the time"


@pytest.mark.soak
@pytest.mark.timeout(1500)
async def test_five_kills_of_real_engines_lose_no_request(
    tmp_path: Path, random_checkpoint: Path, shm: Path
) -> None:
    from safetensors.torch import load_file

    table = load_file(random_checkpoint / "model.safetensors")
    options: Sequence[str] = [
        *("--model", str(random_checkpoint)),
        *("--set", "rollout.engine.dtype=float32"),
        *("--set", "rollout.engine.max_model_len=256"),
        *("--set", "rollout.engine.kv_cache_memory_bytes=67108864"),
        *("--set", "rollout.engine.block_size=32"),
        *("--set", "rollout.engine.threads=1"),
    ]

    def check(seed: int, sample: Sample) -> None:
        assert sample.token_ids and len(sample.token_ids) == len(sample.logprobs)

    def start(run: Run) -> Callable[[str], Awaitable[object]]:
        return lambda name: run.start(name, WORKER, "--name", name, *options)

    def write(path: Path, number: int) -> refit_pb2.Manifest:
        version = WeightVersion("test", "a", number)
        return write_transfer(path, random_weights(table, number), version, None, set(table))

    await storm(tmp_path, start, check, 128, write, shm)
