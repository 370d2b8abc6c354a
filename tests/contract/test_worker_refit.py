"""Refits of a worker over real gRPC with the fake engine: phases, refusals, spans, the fence."""

import asyncio
import os
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omnifleet.auth import OPEN
from omnifleet.client.rollout import Done, Failed, RolloutClient, Tokens
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, Identity, Sampling, VersionBound, WeightVersion
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import version_from_wire, version_to_wire
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.manifest import bucket_checksum, manifest_digest
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.fake import FakeEngine, fake_table
from omnifleet_rollout.engine.port import EngineDelta, EngineRequest
from omnifleet_rollout.worker.command import Worker

WHO = Identity(run="test")
PROMPT = [10, 11, 12]


def write_transfer(
    path: Path,
    number: int,
    *,
    parent: WeightVersion | None = None,
    changed: frozenset[int] = frozenset({0, 1, 2}),
) -> refit_pb2.Manifest:
    """A complete refit of the fake table in two buckets; every byte is `number`."""
    manifest = refit_pb2.Manifest(
        version=version_to_wire(WeightVersion("test", "a", number)),
        parent=version_to_wire(parent),
        checksum_algorithm="blake3",
    )
    buckets: dict[int, int] = {}
    for index, spec in enumerate(fake_table()):
        bucket = min(index, 1)
        entry = manifest.tensors.add(name=spec.name, dtype=spec.dtype, shape=spec.shape, bytes=spec.bytes)
        entry.changed = index in changed
        if entry.changed:
            entry.bucket, entry.offset = bucket, buckets.get(bucket, 0)
            buckets[bucket] = entry.offset + spec.bytes
    data = b""
    for bucket in range(2):
        body = bytes([number]) * buckets.get(bucket, 0)
        manifest.buckets.add(index=bucket, bytes=len(body), checksum=bucket_checksum(body))
        data += body
    path.write_bytes(data)
    return manifest


def damage(path: Path) -> None:
    """Change one byte."""
    path.write_bytes(b"\xff" + path.read_bytes()[1:])


class Sender:
    """The two calls of a refit."""

    def __init__(self, stub: refit_pb2_grpc.RefitStub) -> None:
        self.stub = stub

    async def stage(self, manifest: refit_pb2.Manifest, path: Path) -> str:
        request = refit_pb2.StageRequest(manifest=manifest, shm=refit_pb2.ShmTransport(path=str(path)))
        with remote_errors():
            reply = await self.stub.Stage(request, timeout=10)
        return str(reply.manifest_digest)

    async def commit(
        self, digest: str, policy: int = refit_pb2.KEEP, deadline_s: float = 10
    ) -> refit_pb2.CommitReply:
        request = refit_pb2.CommitRequest(
            manifest_digest=digest, in_flight=policy, deadline_ms=int(1000 * deadline_s)
        )
        with remote_errors():
            reply: refit_pb2.CommitReply = await self.stub.Commit(request, timeout=20)
        return reply


@asynccontextmanager
async def running(engine: FakeEngine) -> AsyncIterator[tuple[Worker, RolloutClient, Sender]]:
    await engine.start()
    worker = Worker(engine, "worker-0", RolloutConfig(), OPEN)
    async with (
        serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="listen", grace_s=0.2) as address,
        open_channel(address) as channel,
        RolloutClient.open(address) as client,
    ):
        yield worker, client, Sender(refit_pb2_grpc.RefitStub(channel))


async def refusal(step: object) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as refused:
        await step  # type: ignore[misc]
    return refused.value


async def test_a_whole_refit_is_committed_under_its_digest(shm: Path) -> None:
    engine = FakeEngine()
    async with running(engine) as (worker, _, sender):
        assert worker.standing.version.lineage == "base"
        manifest = write_transfer(shm, 1)
        digest = await sender.stage(manifest, shm)
        assert worker.standing.version.number == 0 and not engine.weights
        os.unlink(shm)  # the shadow is a copy: the sender may go on
        reply = await sender.commit(digest)
        assert digest == manifest_digest(manifest)
        assert (
            version_from_wire(reply.version)
            == WeightVersion("test", "a", 1, digest)
            == worker.standing.version
        )
        assert reply.tensors_loaded == 3
        assert set(engine.weights["layers.2.weight"]) == {1}
        again = await sender.commit(digest)
        assert again.version == reply.version


async def test_a_refit_on_top_of_the_current_version_sends_only_what_changed(shm: Path) -> None:
    engine = FakeEngine()
    async with running(engine) as (worker, _, sender):
        await sender.commit(await sender.stage(write_transfer(shm, 1), shm))
        second = write_transfer(shm, 2, parent=worker.standing.version, changed=frozenset({1}))
        reply = await sender.commit(await sender.stage(second, shm))
        assert reply.tensors_loaded == 1
        assert set(engine.weights["layers.1.weight"]) == {2} and set(engine.weights["layers.0.weight"]) == {1}


async def test_what_is_not_whole_or_not_ours_is_refused_and_the_old_version_serves(shm: Path) -> None:
    engine = FakeEngine()
    async with running(engine) as (worker, client, sender):
        before = worker.standing.version

        corrupt = write_transfer(shm, 1)
        damage(shm)
        assert "checksum" in (await refusal(sender.stage(corrupt, shm))).message

        missing = write_transfer(shm, 1)
        del missing.tensors[2]
        assert "layers.2.weight" in (await refusal(sender.stage(missing, shm))).message

        foreign = write_transfer(shm, 1)
        foreign.tensors[0].name = "stranger"
        assert "stranger" in (await refusal(sender.stage(foreign, shm))).message

        wrong_shape = write_transfer(shm, 1)
        wrong_shape.tensors[0].shape[0] = 8
        assert "layers.0.weight" in (await refusal(sender.stage(wrong_shape, shm))).message

        orphan = write_transfer(shm, 1, parent=WeightVersion("test", "a", 0), changed=frozenset({0}))
        assert "builds on" in (await refusal(sender.stage(orphan, shm))).message

        no_parent = write_transfer(shm, 1, changed=frozenset({0}))
        assert "no parent" in (await refusal(sender.stage(no_parent, shm))).message

        elsewhere = Path("/tmp/omnifleet-not-shared-memory")
        assert "/dev/shm" in (await refusal(sender.stage(write_transfer(shm, 1), elsewhere))).message

        assert (await refusal(sender.commit("00" * 32))).reason is Reason.REFIT_REJECTED
        assert worker.standing.version == before and not engine.weights
        reply = await client.generate(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=2), identity=WHO, deadline_s=10
        )
        assert reply.samples[0].spans[0].version == before


async def test_going_back_inside_a_lineage_is_refused(shm: Path) -> None:
    async with running(FakeEngine()) as (_, _, sender):
        await sender.commit(await sender.stage(write_transfer(shm, 5), shm))
        assert "older" in (await refusal(sender.stage(write_transfer(shm, 4), shm))).message


async def test_an_aborted_stage_cannot_be_committed(shm: Path) -> None:
    async with running(FakeEngine()) as (_, _, sender):
        digest = await sender.stage(write_transfer(shm, 1), shm)
        await sender.stub.Abort(refit_pb2.AbortRequest(manifest_digest=digest), timeout=5)
        assert (await refusal(sender.commit(digest))).reason is Reason.REFIT_REJECTED


@pytest.mark.parametrize("policy", [refit_pb2.KEEP, refit_pb2.RECOMPUTE])
async def test_a_refit_during_a_reply_gives_two_spans(shm: Path, policy: int) -> None:
    async with running(FakeEngine(token_s=0.005)) as (worker, client, sender):
        old = worker.standing.version
        digest = await sender.stage(write_transfer(shm, 1), shm)
        done, commit = None, None
        async for event in client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=60), identity=WHO, deadline_s=30
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(sender.commit(digest, policy))
            if isinstance(event, Done):
                done = event
        assert commit is not None and (await commit).in_flight == 1
    assert done is not None and done.tokens == 60
    first, second = done.spans
    assert (first.version, second.version.number) == (old, 1)
    assert first.start == 0 and first.end == second.start and second.end == 60
    assert worker.counters.count("span_mismatches") == 0


@pytest.mark.parametrize("policy", [refit_pb2.KEEP, refit_pb2.RECOMPUTE])
async def test_no_request_shares_kv_with_those_of_other_weights(shm: Path, policy: int) -> None:
    """The salt of each engine request. One that goes on keeps its own, which no later one has."""

    class Noting(FakeEngine):
        def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
            salts.append(request.salt)
            return super().generate(request)

    salts: list[str] = []
    async with running(Noting(token_s=0.005)) as (worker, client, sender):
        old = worker.standing.version

        async def ask() -> None:
            await client.generate(
                prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=2), identity=WHO, deadline_s=10
            )

        await ask()
        await ask()
        digest = await sender.stage(write_transfer(shm, 1), shm)
        commit = None
        async for event in client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=60), identity=WHO, deadline_s=30
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(sender.commit(digest, policy))
        assert commit is not None
        await commit
        new = worker.standing.version
        await ask()
    assert salts == [str(old)] * 3 + [str(new)] and str(old) != str(new)


async def test_an_exact_reply_is_finished_before_the_gate(shm: Path) -> None:
    async with running(FakeEngine(token_s=0.005)) as (worker, client, sender):
        bound = VersionBound(exact=worker.standing.version)
        digest = await sender.stage(write_transfer(shm, 1), shm)
        started = asyncio.Event()

        async def reply() -> Done | Failed | None:
            async for event in client.stream(
                prompt_token_ids=PROMPT,
                sampling=Sampling(max_tokens=30),
                identity=WHO,
                bound=bound,
                deadline_s=30,
            ):
                started.set()
                if isinstance(event, Done | Failed):
                    return event
            return None

        task = asyncio.create_task(reply())
        await started.wait()
        await sender.commit(digest)
        end = await task
    assert isinstance(end, Done) and len(end.spans) == 1 and end.tokens == 30


async def test_an_exact_reply_that_takes_too_long_ends_with_version_moved_and_its_tokens(shm: Path) -> None:
    async with running(FakeEngine(token_s=0.005)) as (worker, client, sender):
        old = worker.standing.version
        digest = await sender.stage(write_transfer(shm, 1), shm)
        events, commit = [], None
        async for event in client.stream(
            prompt_token_ids=PROMPT,
            sampling=Sampling(max_tokens=1500),
            identity=WHO,
            bound=VersionBound(exact=old),
            deadline_s=30,
        ):
            events.append(event)
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(sender.commit(digest, deadline_s=0.2))
        assert commit is not None
        await commit
    assert isinstance(events[-1], Failed) and events[-1].error.reason is Reason.VERSION_MOVED
    spans = {span.version for event in events if isinstance(event, Tokens) for span in event.spans}
    assert spans == {old}


async def test_drain_waits_and_gives_up_before_the_gate(shm: Path) -> None:
    async with running(FakeEngine(token_s=0.005)) as (_, client, sender):
        digest = await sender.stage(write_transfer(shm, 1), shm)
        tries: list[Reason] = []
        done = None
        async for event in client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=100), identity=WHO, deadline_s=30
        ):
            if isinstance(event, Tokens) and not tries:
                tries.append((await refusal(sender.commit(digest, refit_pb2.DRAIN_FIRST, 0.1))).reason)
                commit = asyncio.create_task(sender.commit(digest, refit_pb2.DRAIN_FIRST))
            if isinstance(event, Done):
                done = event
        assert (await commit).in_flight == 0
    assert tries == [Reason.DEADLINE]
    assert done is not None and len(done.spans) == 1 and done.finish_reason is FinishReason.LENGTH


async def test_a_refit_that_breaks_half_way_fences_until_a_complete_one(shm: Path) -> None:
    engine = FakeEngine(token_s=0.005)
    async with running(engine) as (worker, client, sender):
        digest = await sender.stage(write_transfer(shm, 1), shm)
        engine.fail_commit = True
        failed, commit = None, None
        async for event in client.stream(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=1500), identity=WHO, deadline_s=30
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(refusal(sender.commit(digest)))
            if isinstance(event, Failed):
                failed = event.error
        assert commit is not None and (await commit).reason is Reason.FENCED
        assert failed is not None and failed.reason is Reason.FENCED and failed.retryable
        assert str(worker.standing.state) == "stale"
        fenced = await refusal(
            client.generate(prompt_token_ids=PROMPT, sampling=Sampling(), identity=WHO, deadline_s=5)
        )
        assert fenced.reason is Reason.FENCED
        partial = write_transfer(shm, 2, parent=worker.standing.version, changed=frozenset({0}))
        assert "complete refit" in (await refusal(sender.stage(partial, shm))).message
        await sender.commit(await sender.stage(write_transfer(shm, 2), shm))
        reply = await client.generate(
            prompt_token_ids=PROMPT, sampling=Sampling(max_tokens=2), identity=WHO, deadline_s=10
        )
        assert reply.samples[0].spans[0].version.number == 2
