"""The gateway over real gRPC: fan-out, loss and continuation, bounds, versions, deadlines, cancellation, drains."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import pytest

from omnifleet.client.fleet import Verb
from omnifleet.client.rollout import Done, PromptSeen, Tokens
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import (
    FinishReason,
    Generation,
    Identity,
    LogprobsMode,
    Sampling,
    VersionBound,
    WorkerState,
)
from omnifleet.wire import rollout_pb2
from omnifleet.wire.codec import sampling_to_wire
from tests.contract.gateway_world import PICTURE, PROMPT, WHO, World, token, until, v, world


async def ask(
    here: World, *, n: int = 1, max_tokens: int = 4, deadline_s: float = 20.0, **more: Any
) -> Generation:
    sampling = Sampling(n=n, max_tokens=max_tokens, seed=3)
    return await here.client.generate(
        prompt_token_ids=PROMPT, sampling=sampling, identity=WHO, deadline_s=deadline_s, **more
    )


def said(seed: int, count: int) -> list[int]:
    return [token(seed, position) for position in range(count)]


async def test_samples_stay_together_with_their_own_seeds_and_spans(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one, two = await here.worker("w-1"), await here.worker("w-2")
        reply = await ask(here, n=3, media=[PICTURE], logprobs_mode=LogprobsMode.PROCESSED)
        assert reply.prompt_token_ids == PROMPT and not reply.failures
        assert {len(one.requests), len(two.requests)} == {0, 3}
        for index, sample in reply.samples.items():
            assert sample.token_ids == said(3 + index, 4)
            assert [(s.start, s.end, s.version) for s in sample.spans] == [(i, i + 1, v(0)) for i in range(4)]
        requests = one.requests or two.requests
        assert sorted(r.identity.sample for r in requests) == [0, 1, 2]
        assert here.gateway.dispatcher.accounts.runs["test"]["tokens"] == 12
        assert here.gateway.counters.count("samples_finished") == 3
        assert here.gateway.dispatcher.requests == 0


async def test_a_worker_that_dies_mid_stream_is_continued_from_its_exact_tokens(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        first = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here, n=1, max_tokens=6))
        for _ in range(3):
            first.go.release()
        await until(lambda: here.gateway.counters.count("tokens") == 3)
        second = await here.worker("w-2")
        await here.kill(first)
        reply = await task
        sample = reply.samples[0]
        assert sample.token_ids == said(3, 6) and len(sample.logprobs) == 6
        spans = [(s.worker, s.start, s.end) for s in sample.spans]
        assert spans == [("w-1", 0, 3), ("w-2", 3, 4), ("w-2", 4, 5), ("w-2", 5, 6)]
        assert list(second.requests[0].continuation.token_ids) == said(3, 3)
        assert second.requests[0].sampling.max_tokens == 6
        assert here.gateway.counters.count("continuations") == 1
        lost = here.gateway.fleet.registry.worker("w-1")
        assert lost is not None and lost.state is WorkerState.SUSPECT


async def test_a_worker_lost_after_its_last_token_needs_no_other_worker(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        only = await here.worker("w-1")
        whole = only._reply

        async def reply_without_end(request: Any) -> AsyncIterator[Any]:
            async for event in whole(request):
                if event.WhichOneof("event") == "finished":
                    raise retryable(Reason.WORKER_LOST, "died before saying so")
                yield event

        only._reply = reply_without_end  # type: ignore[method-assign]
        reply = await ask(here, max_tokens=4)
        assert reply.samples[0].token_ids == said(3, 4)
        assert reply.samples[0].finish_reason is FinishReason.LENGTH
        assert [(s.start, s.end, s.worker) for s in reply.samples[0].spans] == [(0, 4, "w-1")]
        assert len(only.requests) == 1


@pytest.mark.parametrize("reason", [Reason.DRAINING, Reason.FENCED, Reason.ENGINE_ERROR, Reason.OVERLOADED])
async def test_typed_refusals_go_elsewhere(tmp_path: Path, reason: Reason) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1")
        one.refuse.append(retryable(reason, "not now"))
        two = await here.worker("w-2")
        assert (await ask(here)).samples[0].token_ids == said(3, 4)
        assert len(two.requests) == 1


async def test_an_engine_error_is_retried_once_only(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one, two = await here.worker("w-1"), await here.worker("w-2")
        for worker in (one, two):
            worker.fail_at[2] = retryable(Reason.ENGINE_ERROR, "kernel died")
        reply = await ask(here)
        error = reply.failures[0]
        assert isinstance(error, OmnifleetError) and error.reason is Reason.ENGINE_ERROR
        assert len(one.requests) + len(two.requests) == 2


async def test_a_callers_mistake_is_refused_and_not_retried(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1")
        one.refuse += [
            OmnifleetError(Reason.PROMPT_TOO_LONG, "3 tokens > 2", knob="rollout.engine.max_model_len")
        ] * 2
        with pytest.raises(OmnifleetError) as caught:
            await ask(here)
        assert (
            caught.value.reason is Reason.PROMPT_TOO_LONG
            and caught.value.knob == "rollout.engine.max_model_len"
        )
        assert len(one.requests) == 1
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, max_tokens=0)
        assert caught.value.reason is Reason.INVALID_REQUEST


async def test_full_queues_refuse_with_advice_and_the_client_waits_its_turn(tmp_path: Path) -> None:
    async with world(tmp_path, queue_per_worker=1) as here:
        one = await here.worker("w-1", max_running=1, paused=True)
        first = asyncio.create_task(ask(here, n=2, max_tokens=1))
        await until(lambda: len(one.requests) == 2)
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, deadline_s=0.2)
        assert caught.value.reason is Reason.OVERLOADED and caught.value.retry_after_ms > 0
        waiting = asyncio.create_task(ask(here, max_tokens=1))
        await until(lambda: here.gateway.counters.count("refusals_overloaded") >= 2)
        for _ in range(3):
            one.go.release()
        assert not (await first).failures and not (await waiting).failures


async def test_minimum_version_waits_for_a_worker_and_is_refused_at_the_deadline(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", 4)
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, bound=VersionBound(min=v(5)), deadline_s=0.5)
        assert caught.value.reason is Reason.VERSION_TOO_OLD and caught.value.current_version == v(4)
        assert not one.requests
        task = asyncio.create_task(ask(here, bound=VersionBound(min=v(5))))
        await until(lambda: here.gateway.dispatcher.waiting == 1)
        one.version = v(5)
        await here.heartbeat(one)
        assert (await task).samples[0].oldest_version == 5


async def test_a_worker_that_is_behind_its_own_report_is_asked_again(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", 5)
        one.refuse.append(
            OmnifleetError(Reason.VERSION_TOO_OLD, "not yet", retryable=True, current_version=v(4))
        )
        assert (await ask(here, bound=VersionBound(min=v(5)))).samples[0].oldest_version == 5


async def test_exact_version_picks_its_worker_and_moves_on_only_when_it_is_past(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.worker("w-1", 6)
        two = await here.worker("w-2", 5)
        reply = await ask(here, n=2, bound=VersionBound(exact=v(5)))
        assert {s.spans[0].worker for s in reply.samples.values()} == {"w-2"}
        two.refuse.append(OmnifleetError(Reason.VERSION_MOVED, "moved", retryable=True, current_version=v(6)))
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, bound=VersionBound(exact=v(5)))
        assert caught.value.reason is Reason.VERSION_MOVED
        two.version = v(6)
        await here.heartbeat(two)
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, bound=VersionBound(exact=v(5)))
        assert caught.value.reason is Reason.VERSION_MOVED and caught.value.current_version == v(6)


async def test_a_newcomer_serves_only_after_it_has_the_announced_weights(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.fleet.announce_version(v(2), max_lag=1)
        one = await here.worker("w-1", 1)
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, deadline_s=0.4)
        assert caught.value.reason is Reason.NO_WORKER and "catching_up" in caught.value.message
        one.version = v(2)
        await here.heartbeat(one)
        assert not (await ask(here)).failures


async def test_the_deadline_ends_samples_with_a_typed_error_and_reaches_the_worker(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        one.go.release()
        reply = await ask(here, deadline_s=1.0)
        error = reply.failures[0]
        assert isinstance(error, OmnifleetError) and error.reason is Reason.DEADLINE and error.retryable
        await asyncio.wait_for(one.cancelled.wait(), 5)
        await until(lambda: one.running == 0)


async def test_cancelling_the_call_reaches_the_worker(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here, n=2))
        await until(lambda: one.running == 2)
        task.cancel()
        await until(lambda: one.running == 0)
        assert one.cancelled.is_set()
        await until(lambda: here.gateway.dispatcher.requests == 0)


async def test_abort_finishes_samples_with_what_they_have(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here, request_id="me"))
        one.go.release()
        await until(lambda: here.gateway.counters.count("tokens") == 1)
        assert await here.client.abort(["me", "unknown"]) == 1
        sample = (await task).samples[0]
        assert sample.finish_reason is FinishReason.ABORT and sample.token_ids == said(3, 1)
        await until(lambda: one.running == 0)


async def test_a_draining_worker_finishes_what_it_has_and_takes_nothing_new(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here))
        await until(lambda: one.running == 1)
        await here.fleet.act(Verb.DRAIN, "w-1", "test")
        two = await here.worker("w-2")
        assert not (await ask(here)).failures
        assert len(one.requests) == 1 and len(two.requests) == 1
        for _ in range(4):
            one.go.release()
        assert {s.worker for s in (await task).samples[0].spans} == {"w-1"}


async def test_a_retired_worker_is_left_at_once_and_its_samples_go_on_elsewhere(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        task = asyncio.create_task(ask(here, max_tokens=4))
        one.go.release()
        await until(lambda: here.gateway.counters.count("tokens") == 1)
        await here.worker("w-2")
        await here.fleet.act(Verb.RETIRE, "w-1", "bad host")
        sample = (await task).samples[0]
        assert sample.token_ids == said(3, 4)
        assert [s.worker for s in sample.spans] == ["w-1", "w-2", "w-2", "w-2"]


async def test_a_prompt_that_workers_see_differently_is_refused(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1")
        one.fail_at[2] = retryable(Reason.WORKER_LOST, "gone")
        two = await here.worker("w-2")
        honest = two._reply

        async def other_prompt(request: Any) -> AsyncIterator[Any]:
            async for event in honest(request):
                if event.WhichOneof("event") == "prompt":
                    event.prompt.prompt_hash = "0" * 64
                yield event

        two._reply = other_prompt  # type: ignore[method-assign]
        error = (await ask(here)).failures[0]
        assert isinstance(error, OmnifleetError) and error.reason is Reason.CORRUPT


async def test_sessions_stick_and_events_come_in_order(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        await here.worker("w-1")
        await here.worker("w-2")
        homes = set()
        for _ in range(4):
            who = Identity(run="test", session="s")
            kinds = []
            stream = here.client.stream(
                prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=2), identity=who, deadline_s=10
            )
            async for event in stream:
                kinds.append(type(event))
                if isinstance(event, Tokens):
                    homes.add(event.spans[0].worker)
            assert kinds == [PromptSeen, Tokens, Tokens, Done]
        assert len(homes) == 1


async def test_scores_are_forwarded_and_go_elsewhere_on_loss(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one, two = await here.worker("w-1", 3), await here.worker("w-2", 3)
        for worker in (one, two):
            worker.refuse.append(retryable(Reason.DRAINING, "leaving"))
        two.refuse.clear()
        assert await here.client.score_tokens(PROMPT, [1, 2]) == ([-1.0, -1.0], v(3))


async def test_an_assigned_pool_serves_its_run_only_and_within_its_quota(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        await here.fleet.assign("default", "test", quota=2, priority=-5)
        with pytest.raises(OmnifleetError) as caught:
            await here.client.generate(
                prompt_token_ids=PROMPT, sampling=Sampling(), identity=Identity(run="other"), deadline_s=0.3
            )
        assert caught.value.reason is Reason.NO_WORKER
        task = asyncio.create_task(ask(here, n=2, max_tokens=1))
        await until(lambda: one.running == 2)
        assert one.requests[0].priority == -5
        with pytest.raises(OmnifleetError) as caught:
            await ask(here, deadline_s=0.2)
        assert caught.value.reason is Reason.OVERLOADED and "quota" in caught.value.knob
        for _ in range(2):
            one.go.release()
        await task
        facts = (await here.client.status()).facts
        assert facts["workers"] == "1 ready" and "2 samples_finished" in facts["run test"]


async def test_leaving_a_stream_early_ends_the_work(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", paused=True)
        one.go.release()
        stream = here.client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=9), identity=WHO, deadline_s=20
        )
        async with aclosing(stream):
            async for event in stream:
                if isinstance(event, Tokens):
                    break
        await until(lambda: one.running == 0)
        await until(lambda: here.gateway.dispatcher.requests == 0)


async def test_an_abort_that_comes_before_a_sample_began_ends_it_and_gives_its_place_back(
    tmp_path: Path,
) -> None:
    async with world(tmp_path) as here:
        await here.worker("w-1", paused=True)
        dispatcher = here.gateway.dispatcher
        request = rollout_pb2.GenerateRequest(
            request_id="mine",
            tokens=rollout_pb2.TokenPrompt(token_ids=PROMPT),
            sampling=sampling_to_wire(Sampling(n=2, max_tokens=4)),
        )
        await until(lambda: here.gateway.ready)

        async def ends() -> list[str]:
            async with aclosing(
                dispatcher.generate(request, asyncio.get_running_loop().time() + 20)
            ) as batches:
                return [event.finished.finish_reason async for events in batches for event in events]

        task = asyncio.create_task(ends())
        asyncio.get_running_loop().call_soon(
            dispatcher.abort, ["mine"]
        )  # runs before the samples' first step
        assert await asyncio.wait_for(task, 5) == ["abort", "abort"]
        [view] = here.gateway.fleet.registry.workers()
        assert dispatcher.load(view) == 0


async def test_a_defect_fails_its_sample_instead_of_leaving_the_caller_to_its_deadline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: Any, chunk: Any) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr("omnifleet_rollout.gateway.progress.Progress.take", broken)
    async with world(tmp_path) as here:
        await here.worker("w-1")
        reply = await asyncio.wait_for(ask(here), 5)
        assert reply.failures[0].reason is Reason.INTERNAL
        [view] = here.gateway.fleet.registry.workers()
        await until(lambda: here.gateway.dispatcher.load(view) == 0)


async def test_whole_samples_come_in_one_piece_also_when_two_workers_made_them(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        one = await here.worker("w-1", 1)
        one.fail_at[2] = retryable(Reason.WORKER_LOST, "gone")
        await here.worker("w-2", 1)
        stream = here.client.stream(
            prompt_token_ids=PROMPT,
            sampling=Sampling(max_tokens=4, seed=3),
            identity=WHO,
            deadline_s=10,
            whole_samples=True,
        )
        seen, tokens, done = [event async for event in stream]
        assert isinstance(seen, PromptSeen) and isinstance(tokens, Tokens) and isinstance(done, Done)
        assert tokens.token_ids == said(3, 4) and not tokens.spans and len(tokens.logprobs) == 4
        assert [span.worker for span in done.spans] == ["w-1", "w-2", "w-2"]
        assert (done.spans[0].end, done.spans[-1].end) == (2, 4)
