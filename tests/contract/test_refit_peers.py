"""A late or restarted worker catches up alone from a READY peer, and a peer that lies or fails brings it nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.auth import Scope, Tokens
from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight, WeightVersion, WorkerState
from omnifleet.wire import refit_pb2
from omnifleet_rollout.refit.borrowing import borrowed
from omnifleet_trainer.refit.broadcast import BroadcastSender
from omnifleet_trainer.refit.files import FileSender
from omnifleet_trainer.refit.sender import RefitSender
from tests.contract.gateway_world import World, world
from tests.refit_model import MOVES, tensors, write_checkpoint
from tests.refit_processes import joined
from tests.refit_world import CPU, Sender, receiving

SHM = Path("/dev/shm")


def leftovers(folder: Path) -> list[Path]:
    """Files of weights that were taken from peers."""
    return list(folder.glob("omnifleet-refit-peer-*"))


async def ready(here: World, count: int) -> None:
    async with asyncio.timeout(60):
        async for view in here.fleet.watch():
            if [worker.state for worker in view.workers].count(WorkerState.READY) == count:
                return


@asynccontextmanager
async def publisher(transport: str, address: str, secret: str) -> AsyncIterator[RefitSender]:
    if transport == "shm":
        async with FileSender.open(address, secret, run="r", lineage="l") as files:
            yield files
        return
    settings = {"device": CPU, "host": "127.0.0.1", "device_bucket_bytes": 16 << 10}
    async with BroadcastSender.connect(address, secret, run="r", lineage="l", **settings) as group:
        yield group


@pytest.mark.parametrize("transport", ["shm", "nccl"])
async def test_a_late_worker_takes_the_version_from_a_peer_when_the_trainer_is_gone_and_is_built_upon_after(
    tmp_path: Path, transport: str
) -> None:
    tokens = Tokens.generate()
    trainer, service = tokens.secret(Scope.TRAINER), tokens.secret(Scope.SERVICE)
    checkpoint = write_checkpoint(tmp_path / "c")

    async def publish(sender: RefitSender, step: int) -> Any:
        return await sender.publish(step, iter(tensors(step).items()), MOVES, encoder_changed=False)

    async with world(tmp_path, tokens=tokens, heartbeat_s=0.2) as here, AsyncExitStack() as stack:
        first = await stack.enter_async_context(joined(checkpoint, "first", here.address, tokens))
        await ready(here, 1)
        async with publisher(transport, here.address, trainer) as sender:
            for step in range(2):
                assert not (await publish(sender, step)).failed
            assert first.holds(1)
            # Nobody keeps up here: for the newcomer it is as if the trainer were busy or gone.
            late = await stack.enter_async_context(joined(checkpoint, "late", here.address, tokens))
            await ready(here, 2)
            assert late.holds(1) and late.version == first.version, "the very version, digest and all"
            assert late.counters.count("catch_ups_from_peers") == 1
            report = await publish(sender, 2)
            assert len(report.ok) == 2 and late.holds(2) and first.holds(2)
        third = await stack.enter_async_context(joined(checkpoint, "third", here.address, tokens))
        await ready(here, 3)
        assert third.holds(2), "the sender is gone for good"
        async with RefitClient.open(third.address, service) as client:
            with pytest.raises(OmnifleetError) as caught:
                async for _ in client.fetch(WeightVersion("r", "l", 1, "0" * 64), deadline_s=10):
                    pass
            assert caught.value.reason is Reason.VERSION_MOVED
    assert not leftovers(SHM)


class Lying:
    """A lender whose parts are told."""

    def __init__(self, parts: list[refit_pb2.Manifest | bytes]) -> None:
        self._parts = parts

    async def fetch(
        self, version: WeightVersion, *, deadline_s: float
    ) -> AsyncGenerator[refit_pb2.Manifest | bytes, None]:
        for part in self._parts:
            yield part


async def test_what_is_not_the_version_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 1, planned=False) as (lender,):
        sender = Sender()
        await sender.publish([lender], 0)
        await sender.publish([lender], 1)
        sender.courier.close()
        version = lender.version
        honest = [part async for part in lender.client.fetch(version, deadline_s=10)]
        manifest, data = honest[0], b"".join(part for part in honest[1:] if isinstance(part, bytes))
        assert isinstance(manifest, refit_pb2.Manifest) and manifest.HasField("parent")
        table = {t.name: (t.dtype, list(t.shape)) for t in lender.engine.facts.tensors}

        async def take(*parts: refit_pb2.Manifest | bytes, of: WeightVersion = version) -> int:
            async with borrowed(Lying(list(parts)), of, table, folder=tmp_path) as weights:  # type: ignore[arg-type]
                return weights.path.stat().st_size

        assert await take(manifest, data) >= len(data)
        assert await take(manifest, data[:100], data[100:]) >= len(data)

        def changed(**fields: Any) -> refit_pb2.Manifest:
            other = refit_pb2.Manifest()
            other.CopyFrom(manifest)
            for name, value in fields.items():
                setattr(other.tensors[0], name, value)
            return other

        flipped = bytes([data[0] ^ 1]) + data[1:]
        other = WeightVersion("r", "l", 2, version.manifest_digest)
        for parts, of, reason, words in [
            ((manifest, flipped), version, Reason.REFIT_REJECTED, "does not match its digest"),
            ((manifest, data[:-1]), version, Reason.UNAVAILABLE, "stopped"),
            ((manifest, data, b"x"), version, Reason.REFIT_REJECTED, "more than its tensors"),
            ((manifest, data[:50], manifest), version, Reason.REFIT_REJECTED, "another manifest"),
            ((data,), version, Reason.REFIT_REJECTED, "no manifest"),
            ((), version, Reason.REFIT_REJECTED, "no manifest"),
            ((changed(digest="0" * 64), data), version, Reason.REFIT_REJECTED, "not that of"),
            ((changed(name="stranger"), data), version, Reason.REFIT_REJECTED, "not that of"),
            ((manifest, data), other, Reason.REFIT_REJECTED, "not that of"),
        ]:
            with pytest.raises(OmnifleetError, match=words) as caught:
                await take(*parts, of=of)
            assert caught.value.reason is reason, words
        assert not leftovers(tmp_path)


async def test_a_lender_that_is_quarantined_or_has_cut_its_tensors_gives_nothing(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2) as (planned, quarantined):
        sender = Sender()
        for step in range(2):
            await sender.publish([planned, quarantined], step)
        sender.courier.close()
        assert planned.engine.by_plan[-1], "half of q, k and v is all that lies in parameter memory"
        await quarantined.client.quarantine("a test said so")
        for lender, reason in ((planned, Reason.UNSUPPORTED), (quarantined, Reason.VERSION_MOVED)):
            with pytest.raises(OmnifleetError) as caught:
                async for _ in lender.client.fetch(lender.version, deadline_s=10):
                    pass
            assert caught.value.reason is reason
        with pytest.raises(OmnifleetError, match="only the trainer"):
            await quarantined.receiver.adopt(
                planned.version, refit_pb2.Manifest(), refit_pb2.Manifest(), "nowhere"
            )


async def test_a_worker_killed_while_it_takes_weights_has_changed_nothing(tmp_path: Path) -> None:
    async with receiving(write_checkpoint(tmp_path / "c"), 2, planned=False) as (lender, late):
        sender = Sender()
        await sender.publish([lender], 0)
        sender.courier.close()
        table = {t.name: (t.dtype, list(t.shape)) for t in lender.engine.facts.tensors}
        async with borrowed(lender.client, lender.version, table) as weights:
            digest = await late.receiver.adopt(
                lender.version, weights.original, weights.manifest, str(weights.path)
            )
            assert late.holds(-1), "staged is not served"
        await late.receiver.abort(digest)
        with pytest.raises(OmnifleetError, match="is staged here"):
            await late.receiver.commit(digest, InFlight.KEEP, 10)
        assert late.holds(-1)
