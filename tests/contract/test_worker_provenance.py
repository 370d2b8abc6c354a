"""What comes with a sample over real gRPC, with the fake engine: versions a token, extras, and logprobs that are numbers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator
from pathlib import Path

import pytest
from safetensors.numpy import load

from omnifleet.errors import Reason
from omnifleet.types import FinishReason, Identity, Sampling, VersionSpan, WeightVersion
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import sampling_to_wire
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.engine.port import EngineDelta, EngineRequest
from omnifleet_rollout.worker.extras import Extras
from omnifleet_rollout.worker.mailbox import Mailbox
from tests.contract.test_worker_generate import running as serving_worker
from tests.contract.test_worker_refit import running, write_transfer

WHO = Identity(run="test")
PROMPT = [10, 11, 12]


async def test_STL_05_a_reply_across_a_refit_names_the_version_of_each_token(shm: Path) -> None:
    """Ten tokens; the weights change from 7 to 8 after the fourth: 7 x 4, 8 x 6, and staleness is measured from 7."""

    class Halting(FakeEngine):
        """Makes the fifth token only once the refit is done."""

        gate = asyncio.Event()
        fifth = asyncio.Event()

        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            count = 0
            async for delta in super().generate(request):
                count += 1
                yield delta
                if count == 4:
                    self.fifth.set()
                    await self.gate.wait()

    engine = Halting()
    async with running(engine) as (_, client, sender):
        await sender.commit(await sender.stage(write_transfer(shm, 7), shm))
        digest = await sender.stage(write_transfer(shm, 8), shm)
        asking = asyncio.create_task(
            client.generate(
                prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=10), identity=WHO, deadline_s=60
            )
        )
        await engine.fifth.wait()
        await sender.commit(digest)
        engine.gate.set()
        sample = (await asking).samples[0]
    assert [(s.version.number, s.start, s.end) for s in sample.spans] == [(7, 0, 4), (8, 4, 10)]
    assert sample.oldest_version == 7


@pytest.mark.parametrize("value", [-math.inf, math.nan])
async def test_LPR_05_a_token_without_a_probability_fails_its_sample(value: float) -> None:
    class Broken(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            async for delta in super().generate(request):
                yield EngineDelta(delta.token_ids, [value] * len(delta.token_ids), finish=delta.finish)

    async with running(Broken()) as (_, client, _):
        call = client.generate(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=3), identity=WHO, deadline_s=60
        )
        reply = await call
    assert not reply.samples and reply.failures[0].reason is Reason.ENGINE_ERROR
    assert "logprob" in reply.failures[0].message


async def test_the_echo_states_engine_and_the_tokens_that_fit() -> None:
    async with running(FakeEngine(max_model_len=64)) as (_, client, _):
        reply = await client.generate(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=500), identity=WHO, deadline_s=60
        )
    sample = reply.samples[0]
    assert len(sample.token_ids) == 64 - len(PROMPT) and sample.finish_reason is FinishReason.LENGTH


async def test_a_continuation_at_the_end_of_the_context_is_finished_not_refused() -> None:
    async with serving_worker(FakeEngine(max_model_len=8)) as (_, address), open_channel(address) as channel:
        request = rollout_pb2.GenerateRequest(
            request_id="r",
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=sampling_to_wire(Sampling(max_tokens=50)),
            continuation=rollout_pb2.Continuation(token_ids=[5] * 5, logprobs=[-1.0] * 5),
        )
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=60)
        events = [event async for event in call]
    assert (events[0].prompt.engine, events[0].prompt.max_tokens) == ("fake 0", 5)
    assert (events[-1].finished.finish_reason, events[-1].finished.tokens) == ("length", 5)


async def test_routed_experts_reach_the_caller() -> None:
    async with serving_worker(FakeEngine(experts=4)) as (_, address), open_channel(address) as channel:
        request = rollout_pb2.GenerateRequest(
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=sampling_to_wire(Sampling(max_tokens=5)),
        )
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=60)
        finished = [event async for event in call][-1].finished
    experts = load(finished.routed_experts)["routed_experts"]
    assert experts.shape == (len(PROMPT) + 5 - 1, 1, 1) and experts.dtype == "uint8"
    assert finished.sampling_mask == b""


def test_masks_are_flat_and_say_where_they_begin() -> None:
    extras = Extras(before=2)
    extras.take(EngineDelta([5, 6], sampling_mask=[[5, 7], [6]]))
    extras.take(EngineDelta([8], sampling_mask=[[8, 9, 1]]))
    body = load(extras.sampling_mask())
    assert body["token_ids"].tolist() == [5, 7, 6, 8, 9, 1]
    assert body["lengths"].tolist() == [2, 1, 3] and body["start"].tolist() == [2]
    assert extras.routed_experts() == b""


async def test_tokens_merge_between_two_chunks_but_an_end_does_not_wait() -> None:
    mailbox, version = Mailbox(1), WeightVersion("r", "a", 1)
    batches = mailbox.batches()
    mailbox.tokens(0, [1], [-1.0], "", VersionSpan(version, 0, 1))
    assert [list(e.chunk.token_ids) for e in await anext(batches)] == [[1]], "the first token goes at once"
    for i in range(1, 4):
        mailbox.tokens(0, [1 + i], [-1.0], "", VersionSpan(version, i, i + 1))
        await asyncio.sleep(0)
    mailbox.finish(0, rollout_pb2.Finished(tokens=4))
    merged, end = await anext(batches)
    chunk = merged.chunk
    assert list(chunk.token_ids) == [2, 3, 4] and (chunk.spans[0].start, chunk.spans[0].end) == (1, 4)
    assert end.finished.tokens == 4
