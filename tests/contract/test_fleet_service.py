"""The registry over real gRPC: scopes, watch, leases, and a gateway that comes back with the same fleet."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from pathlib import Path

import pytest

from omnifleet.auth import Scope, Tokens
from omnifleet.client.fleet import FleetClient, Verb, WorkerView, worker_id
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WorkerState
from tests.contract.gateway_world import v, world


def report(id: str = "w-1", number: int = 0) -> WorkerView:
    return WorkerView(
        id=id,
        instance="i",
        grpc_address="h:1",
        state=WorkerState.CATCHING_UP,
        version=v(number),
        counters={"a": 2.0},
    )


async def test_each_verb_takes_its_own_scope(tmp_path: Path) -> None:
    tokens = Tokens.generate()
    async with world(tmp_path, tokens=tokens) as here:
        for scope in (Scope.ENV, Scope.TRAINER, Scope.OPERATOR):
            async with FleetClient.open(here.address, tokens.secret(scope)) as client:
                with pytest.raises(OmnifleetError) as caught:
                    await client.join(report())
                assert caught.value.reason is Reason.FORBIDDEN
                await client.list()
        async with FleetClient.open(here.address, tokens.secret(Scope.ENV)) as client:
            with pytest.raises(OmnifleetError):
                await client.act(Verb.DRAIN, "w-1")
        async with FleetClient.open(here.address, "guess") as client:
            with pytest.raises(OmnifleetError) as caught:
                await client.list()
            assert caught.value.reason is Reason.UNAUTHENTICATED


async def test_watch_gives_a_snapshot_and_then_every_change(tmp_path: Path) -> None:
    async with world(tmp_path) as here, asyncio.timeout(20), aclosing(here.fleet.watch()) as views:
        first = await anext(views)
        assert first.workers == [] and first.target_version is None
        membership = await here.fleet.join(report())
        joined = await anext(views)
        assert [w.state for w in joined.workers] == [WorkerState.READY] and joined.workers[0].counters == {
            "a": 2.0
        }
        await here.fleet.announce_version(v(1), max_lag=0)
        behind = await anext(views)
        assert behind.workers[0].state is WorkerState.STALE and behind.target_version == v(1)
        orders = await here.fleet.heartbeat(membership.lease_id, report(number=1))
        assert orders.wanted is WorkerState.READY and orders.target_version == v(1)
        current = await anext(views)
        assert current.workers[0].version == v(1) and current.revision > behind.revision > joined.revision
        assert abs(current.workers[0].heartbeat_unix_ms - joined.workers[0].heartbeat_unix_ms) < 20_000
        await here.fleet.scale(0, reason="night")
        drained = await anext(views)
        assert drained.workers[0].state is WorkerState.DRAINING and drained.workers[0].note == "night"
        await here.fleet.leave(membership.lease_id, "drained")
        assert (await anext(views)).workers == []
        gone = (await here.fleet.list(include_gone=True)).workers
        assert [(w.state, w.note) for w in gone] == [(WorkerState.RETIRED, "drained")]


async def test_an_unknown_lease_is_asked_to_rejoin_and_a_dead_one_told_so(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        assert (await here.fleet.heartbeat("never", report())).rejoin
        membership = await here.fleet.join(report())
        await here.fleet.act(Verb.RETIRE, "w-1", "bad host")
        orders = await here.fleet.heartbeat(membership.lease_id, report())
        assert orders.wanted is WorkerState.RETIRED and not orders.rejoin
        with pytest.raises(OmnifleetError) as caught:
            await here.fleet.join(report())
        assert caught.value.reason is Reason.CONFLICT


async def test_a_gateway_that_comes_back_has_the_same_fleet_and_a_higher_revision(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.fleet.announce_version(v(3))
        lease = (await here.fleet.join(report(number=3))).lease_id
        await here.fleet.scale(2)
        before = await here.fleet.list()
    async with world(tmp_path) as here:
        view = await here.fleet.list()
        assert view.revision > before.revision
        assert (view.desired, view.target_version) == (2, v(3))
        assert view.workers[0].state is WorkerState.SUSPECT, "takes nothing before it has reported again"
        orders = await here.fleet.heartbeat(lease, report(number=3))
        assert orders.wanted is WorkerState.READY and not orders.rejoin


def test_worker_ids_are_a_name_and_a_process() -> None:
    assert worker_id("worker-0", "0123456789ab") == "worker-0-012345"
