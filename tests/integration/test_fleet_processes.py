"""A gateway and fake-engine workers as processes: kill -9 of a worker, a drain, scale, and kill -9 of the gateway."""

from __future__ import annotations

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import httpx

from omnifleet.auth import Scope, Tokens
from omnifleet.client.fleet import FleetClient, FleetView, Verb, WorkerView
from omnifleet.client.rollout import RolloutClient
from omnifleet.client.rollout import Tokens as NewTokens
from omnifleet.service import ServiceRecord, load_tokens, read_records
from omnifleet.types import Generation, Identity, Sampling, WorkerState
from omnifleet_rollout.engine.fake import fake_token

PROMPT = [10, 11, 12]
RUN = Identity(run="test")
GATEWAY = "from omnifleet_rollout.cli import gateway_app; gateway_app()"
WORKER = "from omnifleet_rollout.cli import app; app()"


class Run:
    """A run folder and the processes started in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.tokens: Tokens = load_tokens(path)
        self.processes: dict[str, asyncio.subprocess.Process] = {}

    async def start(self, name: str, command: str, *options: str) -> ServiceRecord:
        """Start a process and wait for its record: beside five busy engines on two cores a real one takes minutes."""
        self.processes[name] = process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", command, "serve", "--run-dir", str(self.path), *options
        )
        async with asyncio.timeout(300):
            while True:
                record = read_records(self.path).get(name)
                if record is not None and record.pid == process.pid:
                    return record
                assert process.returncode is None, f"{name} ended with {process.returncode}"
                await asyncio.sleep(0.05)

    async def gateway(self) -> ServiceRecord:
        """Fast heartbeats, so that the test is short."""
        settings = ("heartbeat_s=0.2", "suspect_after_s=1.0", "dead_after_s=3.0")
        options = [part for setting in settings for part in ("--set", f"gateway.{setting}")]
        return await self.start("gateway", GATEWAY, *options)

    async def worker(self, name: str, token_s: float = 0.02) -> ServiceRecord:
        """One fake engine."""
        return await self.start(
            name, WORKER, "--engine", "fake", "--name", name, "--fake-token-s", str(token_s)
        )

    async def end(self, name: str, number: int) -> int:
        """Signal a process and wait for it."""
        process = self.processes[name]
        process.send_signal(number)
        return await asyncio.wait_for(process.wait(), 15)


@asynccontextmanager
async def running(path: Path) -> AsyncIterator[Run]:
    run = Run(path)
    try:
        yield run
    finally:
        for process in run.processes.values():
            if process.returncode is None:
                process.kill()
                await process.wait()


async def seen(fleet: FleetClient, condition: Callable[[FleetView], bool]) -> FleetView:
    """Watch until a snapshot fits."""
    async with asyncio.timeout(90):
        async for view in fleet.watch(include_gone=True):
            if condition(view):
                return view
    raise AssertionError("the watch ended")


def named(view: FleetView, name: str) -> WorkerView:
    return next(w for w in view.workers if w.id.startswith(name + "-"))


def ready(*names: str) -> Callable[[FleetView], bool]:
    def check(view: FleetView) -> bool:
        states = {w.id.rpartition("-")[0]: w.state for w in view.workers}
        return all(states.get(name) is WorkerState.READY for name in names)

    return check


async def ask(client: RolloutClient, n: int = 4, max_tokens: int = 5) -> Generation:
    return await client.generate(
        prompt_token_ids=PROMPT,
        sampling=Sampling(n=n, max_tokens=max_tokens, seed=5),
        identity=RUN,
        deadline_s=60,
    )


def is_exact(reply: Generation, n: int, max_tokens: int) -> bool:
    """True if every sample is what one undisturbed engine would have said."""
    return not reply.failures and all(
        reply.samples[i].token_ids == [fake_token(PROMPT, 5 + i, k) for k in range(max_tokens)]
        for i in range(n)
    )


async def disturbed(
    client: RolloutClient, disturb: Callable[[str], Awaitable[object]]
) -> tuple[str, set[str]]:
    """Four samples of 100 tokens; after 40 tokens in all, `disturb(name of the worker that makes them)`.

    Every sample must still be exact. Returns the disturbed worker and all that made tokens.
    """
    made: list[NewTokens] = []
    name = ""
    stream = client.stream(
        prompt_token_ids=PROMPT, sampling=Sampling(n=4, max_tokens=100, seed=5), identity=RUN, deadline_s=60
    )
    async for event in stream:
        if isinstance(event, NewTokens):
            made.append(event)
        if len(made) == 40 and not name:
            name = made[0].spans[0].worker.rpartition("-")[0]
            await disturb(name)
    for sample in range(4):
        ids = [id for event in made if event.sample == sample for id in event.token_ids]
        assert ids == [fake_token(PROMPT, 5 + sample, k) for k in range(100)]
    return name, {span.worker.rpartition("-")[0] for event in made for span in event.spans}


async def test_killed_drained_and_scaled_workers_lose_no_token(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        gateway = await run.gateway()
        await asyncio.gather(run.worker("worker-0"), run.worker("worker-1"))
        async with (
            FleetClient.open(gateway.grpc, run.tokens.secret(Scope.OPERATOR)) as fleet,
            RolloutClient.open(gateway.grpc, run.tokens.secret(Scope.TRAINER)) as client,
        ):
            await seen(fleet, ready("worker-0", "worker-1"))

            # kill -9 in the middle of four samples: they go on elsewhere from their exact tokens.
            killed, makers = await disturbed(client, lambda name: run.end(name, signal.SIGKILL))
            assert makers == {"worker-0", "worker-1"}
            await seen(fleet, lambda view: named(view, killed).state is WorkerState.DEAD)
            async with httpx.AsyncClient(base_url=f"http://{gateway.http}") as http:
                secret = run.tokens.secret(Scope.ENV)
                body = (await http.get("/v1/fleet", headers={"authorization": f"Bearer {secret}"})).json()
            account = body["runs"]["test"]
            assert account["samples_finished"] == 4 and "samples_failed" not in account

            # Drain the survivor in the middle of its work: it finishes, leaves, and its process ends by itself.
            await run.worker("worker-2")
            await seen(fleet, ready("worker-2"))
            await fleet.act(Verb.CORDON, "worker-2")
            drained, makers = await disturbed(client, lambda name: fleet.act(Verb.DRAIN, name, "test"))
            assert makers == {drained} and drained != killed
            view = await seen(fleet, lambda view: named(view, drained).state is WorkerState.RETIRED)
            assert named(view, drained).note == "drained"
            assert await asyncio.wait_for(run.processes[drained].wait(), 15) == 0
            await fleet.act(Verb.UNCORDON, "worker-2")
            assert is_exact(await ask(client), 4, 5)

            # Scale up is a wish for the launcher; scale down drains.
            assert await fleet.scale(2) == (2, ())
            await run.worker("worker-3")
            await seen(fleet, ready("worker-2", "worker-3"))
            desired, draining = await fleet.scale(1)
            assert desired == 1 and len(draining) == 1
            gone = draining[0].rpartition("-")[0]
            assert await asyncio.wait_for(run.processes[gone].wait(), 15) == 0
            assert is_exact(await ask(client), 4, 5)
        kept = "worker-2" if gone == "worker-3" else "worker-3"
        for name in (kept, "gateway"):
            assert await run.end(name, signal.SIGTERM) == 0


async def test_a_killed_gateway_comes_back_to_its_fleet(tmp_path: Path) -> None:
    async with running(tmp_path) as run:
        first = await run.gateway()
        await run.worker("worker-0")
        async with FleetClient.open(first.grpc, run.tokens.secret(Scope.OPERATOR)) as fleet:
            await seen(fleet, ready("worker-0"))
            await fleet.scale(3)
            await fleet.act(Verb.PIN, "worker-0")
            before = await fleet.list()
        await run.end("gateway", signal.SIGKILL)
        second = await run.gateway()
        async with (
            FleetClient.open(second.grpc, run.tokens.secret(Scope.OPERATOR)) as fleet,
            RolloutClient.open(second.grpc, run.tokens.secret(Scope.TRAINER)) as client,
        ):
            view = await seen(fleet, ready("worker-0"))
            assert view.desired == 3 and view.revision > before.revision
            assert [(w.id, w.pinned) for w in view.workers] == [(before.workers[0].id, True)]
            assert is_exact(await ask(client, n=2), 2, 5)
