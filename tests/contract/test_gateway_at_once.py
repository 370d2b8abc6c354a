"""Short replies that nobody reads before their end: asked of workers in one message instead of a stream."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from omnifleet.client.fleet import Verb
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Generation, Sampling
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors
from omnifleet_rollout.engine.fake import FakeEngine
from tests.contract.gateway_world import PROMPT, WHO, World, until, world
from tests.contract.test_gateway_dispatch import ask, said
from tests.contract.test_gateway_extras import joined

SHORT = 4


async def test_only_short_whole_replies_are_asked_for_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, short_tokens=SHORT) as here:
        one = await here.worker("w-1")
        reply = await ask(here, n=3, max_tokens=SHORT)
        assert [sample.token_ids for sample in reply.samples.values()] == [
            said(3 + i, SHORT) for i in range(3)
        ]
        assert one.at_once == 3 and reply.prompt_token_ids == PROMPT
        await ask(here, max_tokens=SHORT + 1)
        told: dict[str, Any] = {"sampling": Sampling(max_tokens=SHORT), "identity": WHO, "deadline_s": 20.0}
        assert [event async for event in here.client.stream(prompt_token_ids=PROMPT, **told)]
        assert one.at_once == 3 and len(one.requests) == 5


async def test_a_real_worker_says_the_same_at_once_as_in_a_stream(tmp_path: Path) -> None:
    async def asked(short_tokens: int) -> Generation:
        folder = tmp_path / str(short_tokens)
        folder.mkdir()
        async with (
            world(folder, short_tokens=short_tokens) as here,
            joined(here, "w-1", FakeEngine(experts=4, masks=True)),
        ):
            return await ask(here, n=2, max_tokens=SHORT, request_id="me")

    streamed, at_once = await asked(0), await asked(SHORT)
    for sample in (*streamed.samples.values(), *at_once.samples.values()):
        assert [(span.start, span.end) for span in sample.spans] == [(0, SHORT)]
        sample.spans = []  # they name the worker, which is another one
    assert at_once.samples == streamed.samples and at_once.prompt_hash == streamed.prompt_hash


async def test_a_worker_of_an_older_release_is_asked_by_streams(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def older(servicer: Any, server: Any) -> None:
        Request, Event = rollout_pb2.GenerateRequest, rollout_pb2.GenerateEvent
        generate = grpc.unary_stream_rpc_method_handler(
            servicer.Generate, Request.FromString, Event.SerializeToString
        )
        methods = {"Generate": generate}
        server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("omnifleet.v1alpha.Rollout", methods),)
        )

    async with world(tmp_path, short_tokens=SHORT) as here:
        monkeypatch.setattr(rollout_pb2_grpc, "add_RolloutServicer_to_server", older)
        one = await here.worker("w-1")
        for _ in range(2):
            assert (await ask(here)).samples[0].token_ids == said(3, SHORT)
        assert one.at_once == 0 and len(one.requests) == 2


async def test_a_gateway_is_not_asked_at_once(tmp_path: Path) -> None:
    async with world(tmp_path) as here, open_channel(here.address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)  # type: ignore[no-untyped-call]
        with pytest.raises(OmnifleetError) as told, remote_errors():
            await stub.GenerateAtOnce(rollout_pb2.GenerateRequest(), timeout=10)
        assert told.value.reason is Reason.UNSUPPORTED


async def test_a_reply_of_a_lost_worker_is_made_again_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path, short_tokens=SHORT) as here:
        one = await here.worker("w-1")
        one.fail_at[2] = retryable(Reason.WORKER_LOST, "gone")
        two = await here.worker("w-2")
        sample = (await ask(here)).samples[0]
        assert sample.token_ids == said(3, SHORT) and {span.worker for span in sample.spans} == {"w-2"}
        assert (one.at_once, two.at_once) == (1, 1)


async def test_a_worker_that_is_retired_is_left_at_once(tmp_path: Path) -> None:
    async with world(tmp_path, short_tokens=SHORT) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here))
        await until(lambda: one.running == 1)
        await here.worker("w-2")
        await here.fleet.act(Verb.RETIRE, "w-1", "bad host")
        assert {span.worker for span in (await task).samples[0].spans} == {"w-2"}
        await until(lambda: one.running == 0)


async def hang_up(here: World, task: asyncio.Task[Any]) -> None:
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def abort(here: World, task: asyncio.Task[Any]) -> None:
    assert await here.client.abort(["me"]) == 1
    assert not (await task).samples[0].token_ids


async def run_out(here: World, task: asyncio.Task[Any]) -> None:
    with pytest.raises(OmnifleetError) as told:
        await task
    assert told.value.reason is Reason.DEADLINE and told.value.retryable


@pytest.mark.parametrize(("end", "deadline_s"), [(hang_up, 20.0), (abort, 20.0), (run_out, 1.0)])
async def test_whatever_ends_the_request_reaches_the_worker(
    tmp_path: Path, end: Any, deadline_s: float
) -> None:
    async with world(tmp_path, short_tokens=SHORT) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here, deadline_s=deadline_s, request_id="me"))
        await until(lambda: one.running == 1)
        await end(here, task)
        await asyncio.wait_for(one.cancelled.wait(), 5)
        await until(lambda: one.running == 0 and here.gateway.dispatcher.requests == 0)
