"""A worker over real gRPC with the fake engine: tokens, provenance, versions, admission, endings."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager

import pytest

from omnifleet.address import token_digest
from omnifleet.auth import OPEN
from omnifleet.client.rollout import Done, Failed, PromptSeen, RolloutClient, Tokens
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import (
    Digest,
    FinishReason,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Sampling,
    VersionBound,
    WeightVersion,
)
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import sampling_to_wire
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.fake import IMAGE_FEATURES, IMAGE_TOKEN, FakeEngine, fake_token
from omnifleet_rollout.engine.port import EngineDelta, EngineRequest
from omnifleet_rollout.worker.command import Worker

WHO = Identity(run="test")
PROMPT = [10, 11, 12]


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[tuple[Worker, str]]:
    """A worker on a free port, without a gateway."""
    await engine.start()
    worker = Worker(engine, "worker-0", RolloutConfig(), OPEN)
    async with serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="listen", grace_s=0.2) as address:
        yield worker, address


async def test_samples_carry_tokens_logprobs_and_provenance() -> None:
    async with running(FakeEngine()) as (worker, address), RolloutClient.open(address) as client:
        sampling = Sampling(n=3, max_tokens=5, seed=7)
        reply = await client.generate(prompt_token_ids=PROMPT, sampling=sampling, identity=WHO, deadline_s=10)
    assert reply.prompt_hash == token_digest(PROMPT)
    assert reply.worker == worker.standing.worker
    assert sorted(reply.samples) == [0, 1, 2] and not reply.failures
    for index, sample in reply.samples.items():
        assert sample.token_ids == [fake_token(PROMPT, 7 + index, i) for i in range(5)]
        assert len(sample.logprobs) == 5
        assert sample.finish_reason is FinishReason.LENGTH
        [span] = sample.spans
        assert (span.start, span.end, span.version, span.worker) == (
            0,
            5,
            worker.standing.version,
            reply.worker,
        )


async def test_media_placeholders_are_expanded_before_they_are_hashed() -> None:
    ref = MediaRef(MediaKind.IMAGE, Digest("ab" * 32))
    async with running(FakeEngine()) as (_, address), RolloutClient.open(address) as client:
        reply = await client.generate(
            prompt_token_ids=[10, IMAGE_TOKEN, 12],
            media=[ref],
            sampling=Sampling(max_tokens=1),
            identity=WHO,
            deadline_s=10,
        )
        assert reply.prompt_token_ids == [10, *[IMAGE_TOKEN] * IMAGE_FEATURES, 12]
        with pytest.raises(OmnifleetError) as refused:
            await client.generate(
                prompt_token_ids=[10, 12],
                media=[ref],
                sampling=Sampling(max_tokens=1),
                identity=WHO,
                deadline_s=10,
            )
    assert refused.value.reason is Reason.INVALID_REQUEST


async def test_a_continuation_emits_only_what_is_missing() -> None:
    async with running(FakeEngine()) as (worker, address), open_channel(address) as channel:
        whole = [fake_token(PROMPT, 0, i) for i in range(6)]
        request = rollout_pb2.GenerateRequest(
            request_id="r",
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=sampling_to_wire(Sampling(max_tokens=6)),
            continuation=rollout_pb2.Continuation(
                token_ids=whole[:4],
                logprobs=[-1.0] * 4,
                spans=[
                    {
                        "version": {"run": "test", "lineage": "a", "number": 3},
                        "start": 0,
                        "end": 4,
                        "worker": "gone",
                    }
                ],
            ),
        )
        events = [
            event async for event in rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=10)
        ]
    new = [
        token for event in events if event.WhichOneof("event") == "chunk" for token in event.chunk.token_ids
    ]
    finished = events[-1].finished
    assert new == whole[4:]
    assert finished.tokens == 6
    assert [(s.worker, s.start, s.end) for s in finished.spans] == [
        ("gone", 0, 4),
        (worker.standing.worker, 4, 6),
    ]
    chunk = next(e.chunk for e in events if e.WhichOneof("event") == "chunk")
    assert chunk.spans[0].start == 4


@pytest.mark.parametrize(
    ("bound", "reason"),
    [
        (VersionBound(min=WeightVersion("test", "a", 5)), Reason.VERSION_TOO_OLD),
        (VersionBound(min=WeightVersion("test", "b", 1)), Reason.VERSION_TOO_OLD),
        (VersionBound(exact=WeightVersion("test", "a", 5)), Reason.VERSION_TOO_OLD),
        (VersionBound(exact=WeightVersion("test", "a", 3)), Reason.VERSION_MOVED),
    ],
)
async def test_a_bound_that_the_weights_do_not_meet_is_refused(bound: VersionBound, reason: Reason) -> None:
    async with running(FakeEngine()) as (worker, address), RolloutClient.open(address) as client:
        worker.standing.serve_version(WeightVersion("test", "a", 4))
        with pytest.raises(OmnifleetError) as refused:
            await client.generate(
                prompt_token_ids=PROMPT, sampling=Sampling(), identity=WHO, bound=bound, deadline_s=10
            )
    assert refused.value.reason is reason
    assert refused.value.retryable
    assert refused.value.current_version == WeightVersion("test", "a", 4)


async def test_another_logprobs_mode_is_refused() -> None:
    engine = FakeEngine(logprobs_mode=LogprobsMode.RAW)
    async with running(engine) as (_, address), RolloutClient.open(address) as client:
        with pytest.raises(OmnifleetError) as refused:
            await client.generate(
                prompt_token_ids=PROMPT,
                sampling=Sampling(),
                identity=WHO,
                logprobs_mode=LogprobsMode.PROCESSED,
                deadline_s=10,
            )
    assert refused.value.reason is Reason.LOGPROBS_MODE


async def test_more_than_fits_is_refused_with_advice_and_takes_no_place() -> None:
    async with running(FakeEngine(max_num_seqs=2)) as (worker, address), open_channel(address) as channel:
        request = rollout_pb2.GenerateRequest(
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT), sampling=sampling_to_wire(Sampling(n=7))
        )
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=10)
        with pytest.raises(Exception, match="do not fit"):
            await call.read()
        assert worker.gate.load == 0


async def test_a_cancelled_call_frees_the_engine() -> None:
    engine = FakeEngine(token_s=0.01)
    async with running(engine) as (worker, address), open_channel(address) as channel:
        request = rollout_pb2.GenerateRequest(
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=sampling_to_wire(Sampling(n=2, max_tokens=1000)),
        )
        call = rollout_pb2_grpc.RolloutStub(channel).Generate(request, timeout=30)
        async for event in call:
            if event.WhichOneof("event") == "chunk":
                break
        call.cancel()
        assert await worker.gate.until_gone(5)
        async with asyncio.timeout(5):
            while worker.gate.load or engine.stats().running:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.005)


async def test_aborted_requests_finish_with_reason_abort() -> None:
    async with running(FakeEngine(token_s=0.01)) as (_, address), RolloutClient.open(address) as client:
        ends: list[Done | Failed] = []
        async for event in client.stream(
            prompt_token_ids=PROMPT,
            sampling=Sampling(max_tokens=1000),
            identity=WHO,
            deadline_s=30,
            request_id="mine",
        ):
            if isinstance(event, Tokens):
                await client.abort(["mine"])
            if isinstance(event, Done | Failed):
                ends.append(event)
    [end] = ends
    assert isinstance(end, Done) and end.finish_reason is FinishReason.ABORT and end.tokens < 1000


async def test_a_dead_engine_fails_the_sample_in_a_way_that_retries_elsewhere() -> None:
    engine = FakeEngine(token_s=0.01)
    async with running(engine) as (_, address), RolloutClient.open(address) as client:
        failed = None
        async for event in client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=1000), identity=WHO, deadline_s=30
        ):
            if isinstance(event, Tokens):
                engine.crash()
            if isinstance(event, Failed):
                failed = event.error
    assert failed is not None and failed.reason is Reason.WORKER_LOST and failed.retryable


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new() -> None:
    async with running(FakeEngine(token_s=0.005)) as (worker, address), RolloutClient.open(address) as client:
        seen = asyncio.Event()

        async def consume() -> list[object]:
            events: list[object] = []
            async for event in client.stream(
                prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=40), identity=WHO, deadline_s=30
            ):
                events.append(event)
                seen.set()
            return events

        first = asyncio.create_task(consume())
        await seen.wait()
        worker.standing.start_drain()
        with pytest.raises(OmnifleetError) as refused:
            await client.generate(prompt_token_ids=PROMPT, sampling=Sampling(), identity=WHO, deadline_s=10)
        events = await first
    assert refused.value.reason is Reason.DRAINING and refused.value.retryable
    assert isinstance(events[0], PromptSeen)
    assert isinstance(events[-1], Done) and events[-1].tokens == 40


async def test_given_tokens_are_scored_under_a_named_version() -> None:
    async with running(FakeEngine()) as (worker, address), RolloutClient.open(address) as client:
        logprobs, version = await client.score_tokens(PROMPT, [5, 6])
    assert len(logprobs) == 2 and version == worker.standing.version


async def test_a_caller_that_hangs_up_after_the_last_event_leaves_no_place_taken() -> None:
    """The cancellation meets the worker in the middle of its own cleaning up; each lost place would stay lost for ever."""
    request = rollout_pb2.GenerateRequest(
        tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT), sampling=sampling_to_wire(Sampling(max_tokens=2))
    )
    async with running(FakeEngine()) as (worker, address), open_channel(address) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)

        async def hang_up_at_the_end() -> None:
            call = stub.Generate(request, timeout=20)
            async for event in call:
                if event.WhichOneof("event") == "finished":
                    break
            call.cancel()

        for _ in range(20):
            await asyncio.gather(*(hang_up_at_the_end() for _ in range(16)))
        async with asyncio.timeout(10):
            while worker.gate.load:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.01)
        assert not worker.gate.inside


async def test_a_defect_fails_its_sample_instead_of_leaving_the_caller_to_its_deadline() -> None:
    class Broken(FakeEngine):
        def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            raise AssertionError("a defect")

    async with running(Broken()) as (worker, address), RolloutClient.open(address) as client:
        call = client.generate(prompt_token_ids=PROMPT, sampling=Sampling(), identity=WHO, deadline_s=30)
        reply = await asyncio.wait_for(call, 5)
        assert reply.failures[0].reason is Reason.INTERNAL
        assert await worker.gate.until_gone(5)


async def test_tokens_are_not_scored_by_a_worker_that_was_fenced_at_the_gate() -> None:
    async with running(FakeEngine()) as (worker, address), RolloutClient.open(address) as client:
        worker.gate.close()
        scoring = asyncio.create_task(client.score_tokens(PROMPT, [5, 6]))
        async with asyncio.timeout(5):
            while not worker.gate.load:  # noqa: ASYNC110 - no event tells of it
                await asyncio.sleep(0.005)
        worker.standing.raise_fence("half of a refit")
        worker.gate.open()
        with pytest.raises(OmnifleetError) as refused:
            await scoring
        assert refused.value.reason is Reason.FENCED


async def test_a_reply_that_lost_tokens_is_no_sample() -> None:
    class Losing(FakeEngine):
        async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            yield EngineDelta(token_ids=(1, 2), logprobs=(-1.0, -1.0))
            yield EngineDelta(token_ids=(3,), logprobs=(-1.0,), finish=FinishReason.LENGTH)

    async with running(Losing()) as (_, address), RolloutClient.open(address) as client:
        reply = await client.generate(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=5), identity=WHO, deadline_s=10
        )
    [error] = reply.failures.values()
    assert error.retryable and "after 3 of 5 tokens" in error.message and not reply.samples
