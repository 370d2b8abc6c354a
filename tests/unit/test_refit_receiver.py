"""The receiver without a wire: one step at a time, and a commit that outlives its caller."""

import asyncio
from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, VersionBound, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import base_version, bucket_checksum, json_digest, manifest_digest, manifest_json
from omnifleet_rollout.engine.fake import FakeEngine, fake_table
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.worker.gate import Flight, Gate
from omnifleet_rollout.worker.standing import Standing


def whole_refit(path: Path, number: int) -> refit_pb2.Manifest:
    manifest = refit_pb2.Manifest(checksum_algorithm="blake3")
    manifest.version.run, manifest.version.lineage, manifest.version.number = "test", "a", number
    offset = 0
    for spec in fake_table():
        manifest.tensors.add(
            name=spec.name, dtype=spec.dtype, shape=spec.shape, bytes=spec.bytes, offset=offset, changed=True
        )
        offset += spec.bytes
    data = bytes(offset)
    manifest.buckets.add(index=0, bytes=offset, checksum=bucket_checksum(data))
    path.write_bytes(data)
    return manifest


async def started() -> tuple[FakeEngine, Gate, Receiver]:
    engine = FakeEngine()
    await engine.start()
    gate = Gate(Standing("w", base_version(engine.facts.tensors)), limit=8)
    return engine, gate, Receiver(engine, gate, Counters("test"))


async def closed(gate: Gate) -> None:
    """Return once a commit has closed the gate and waits for what runs."""
    async with asyncio.timeout(10):
        while gate._open.is_set():  # noqa: ASYNC110 - no event tells of a closed gate
            await asyncio.sleep(0)


def test_the_digest_covers_everything_but_itself(shm: Path) -> None:
    manifest = whole_refit(shm, 1)
    digest = manifest_digest(manifest)
    manifest.version.manifest_digest = digest
    assert manifest_digest(manifest) == digest == json_digest(manifest_json(manifest))
    manifest.encoder_changed = True
    assert manifest_digest(manifest) != digest


async def test_a_commit_goes_on_when_its_caller_is_cancelled(shm: Path) -> None:
    _, gate, receiver = await started()
    digest, _ = await receiver.stage(whole_refit(shm, 1), str(shm))
    flight = Flight("r", VersionBound())
    await gate.enter([flight], VersionBound())
    call = asyncio.create_task(receiver.commit(digest, InFlight.DRAIN, 10))
    await closed(gate)
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    gate.leave(flight)
    gate.standing.changed.clear()
    await asyncio.wait_for(gate.standing.changed.wait(), 5)
    assert gate.standing.version == WeightVersion("test", "a", 1, digest)


async def test_a_second_step_at_the_same_time_is_a_conflict(shm: Path) -> None:
    _, gate, receiver = await started()
    manifest = whole_refit(shm, 1)
    digest, _ = await receiver.stage(manifest, str(shm))
    flight = Flight("r", VersionBound())
    await gate.enter([flight], VersionBound())
    first = asyncio.create_task(receiver.commit(digest, InFlight.DRAIN, 10))
    await closed(gate)
    with pytest.raises(OmnifleetError) as refused:
        await receiver.stage(manifest, str(shm))
    assert refused.value.reason is Reason.CONFLICT and refused.value.retryable
    gate.leave(flight)
    assert (await first).version.number == 1


async def test_a_newcomer_waits_at_the_closed_gate_and_meets_the_new_version(shm: Path) -> None:
    _, gate, receiver = await started()
    digest, _ = await receiver.stage(whole_refit(shm, 1), str(shm))
    flight = Flight("r", VersionBound())
    await gate.enter([flight], VersionBound())
    commit = asyncio.create_task(receiver.commit(digest, InFlight.DRAIN, 10))
    await closed(gate)
    wanted = VersionBound(exact=WeightVersion("test", "a", 1))
    newcomer = asyncio.create_task(gate.enter([Flight("n", wanted)], wanted))
    await asyncio.sleep(0)
    assert not newcomer.done()
    gate.leave(flight)
    await commit
    await asyncio.wait_for(newcomer, 5)


async def test_a_commit_that_the_engine_refuses_unchanged_does_not_fence(shm: Path) -> None:
    engine, gate, receiver = await started()
    digest, _ = await receiver.stage(whole_refit(shm, 1), str(shm))
    await engine.drop_stage()
    with pytest.raises(OmnifleetError) as refused:
        await receiver.commit(digest, InFlight.KEEP, 10)
    assert refused.value.reason is Reason.REFIT_REJECTED and not gate.standing.fence
    again, _ = await receiver.stage(whole_refit(shm, 1), str(shm))
    assert (await receiver.commit(again, InFlight.KEEP, 10)).version.number == 1


async def test_a_quarantined_worker_may_go_back_by_a_complete_refit(shm: Path) -> None:
    _, gate, receiver = await started()
    digest, _ = await receiver.stage(whole_refit(shm, 5), str(shm))
    await receiver.commit(digest, InFlight.KEEP, 10)
    with pytest.raises(OmnifleetError, match="is older than"):
        await receiver.stage(whole_refit(shm, 4), str(shm))
    assert (await receiver.quarantine("the canary differs")).number == 5
    assert gate.standing.fence == "the canary differs"
    older, _ = await receiver.stage(whole_refit(shm, 4), str(shm))
    await receiver.commit(older, InFlight.KEEP, 10)
    assert gate.standing.version.number == 4 and not gate.standing.fence


async def test_an_abort_ends_a_stage_that_runs(shm: Path) -> None:
    engine, gate, receiver = await started()
    staging, dropped = asyncio.Event(), asyncio.Event()

    async def stage(manifest_json: str, source: str, *, in_place: bool = False) -> int:
        staging.set()
        await dropped.wait()
        raise OmnifleetError(Reason.UNAVAILABLE, "the stage was dropped", retryable=True)

    async def drop_stage() -> None:
        dropped.set()

    engine.stage, engine.drop_stage = stage, drop_stage  # type: ignore[method-assign]
    call = asyncio.create_task(receiver.stage(whole_refit(shm, 1), str(shm)))
    await staging.wait()
    assert await receiver.abort("") == gate.standing.version
    with pytest.raises(OmnifleetError, match="dropped"):
        await call
