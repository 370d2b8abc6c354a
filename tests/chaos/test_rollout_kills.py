"""A worker of three is killed each time the fleet is fully READY, five times, under load: no request is lost."""

from __future__ import annotations

import asyncio
import signal
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, FleetView
from omnifleet.client.rollout import RolloutClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Sample, Sampling, WorkerState
from omnifleet_rollout.engine.fake import fake_token
from tests.integration.test_fleet_processes import PROMPT, RUN, WORKER, Run, running, seen

WORKERS, KILLS, REQUESTS = 3, 5, 64
PROMISED = (Reason.WORKER_LOST, Reason.NO_WORKER, Reason.OVERLOADED, Reason.DEADLINE, Reason.UNAVAILABLE)
"""What docs/api promises to a caller whose reply cannot be finished: retryable, each."""


@dataclass
class Load:
    """Lanes that ask one request after the other. moved: replies that more than one worker made."""

    client: RolloutClient
    tokens: int
    asked: int = 0
    answered: int = 0
    moved: int = 0
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
                self.answered += 1
                self.moved += len({span.worker for span in sample.spans}) > 1

    def _refuse(self, error: OmnifleetError) -> None:
        assert error.reason in PROMISED and error.retryable, error
        self.refused[error.reason] += 1


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
            async with asyncio.TaskGroup() as group:
                for lane in range(REQUESTS):
                    group.create_task(load.lane(lane, over, check))
                killed = await kill_five_times(run, fleet, begin)
                over.set()
    print(
        f"killed {killed}: {load.asked} asked, {load.answered} answered, of which {load.moved} by more than one worker; "
        f"refused {dict(load.refused)}"
    )
    assert len(killed) == KILLS
    assert load.asked == load.answered + load.refused.total(), "each request ended one way or the other"
    assert load.moved > 0, "some were in the middle of a reply"
    return load


@pytest.mark.heavy
@pytest.mark.timeout(400)
async def test_five_kills_lose_no_request_and_no_token(tmp_path: Path) -> None:
    """Fake engines, whose tokens are known: a reply that moved is the one that a single worker would have made."""

    def check(seed: int, sample: Sample) -> None:
        assert sample.token_ids == [fake_token(PROMPT, seed, k) for k in range(100)]

    def start(run: Run) -> Callable[[str], Awaitable[object]]:
        return lambda name: run.worker(name, 0.03)

    # Three seconds a reply: its reader gets parts of it once a second, and what a killed worker made since is made again.
    load = await storm(tmp_path, start, check, tokens=100)
    assert not load.refused, "two of three workers were there all the time"


@pytest.mark.soak
@pytest.mark.timeout(1500)
async def test_five_kills_of_real_engines_lose_no_request(tmp_path: Path, random_checkpoint: Path) -> None:
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

    await storm(tmp_path, start, check, tokens=128)
