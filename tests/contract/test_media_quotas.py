"""Quotas: what the leases of one run may hold, over gRPC and HTTP."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason
from tests.contract.media_world import png, running, served

SIZE = (100, 100)
BYTES = 30_000


async def put(client: MediaClient, seed: int) -> str:
    return (await client.put_image(png(seed, SIZE), "run")).digest


async def over(call) -> OmnifleetError:  # type: ignore[no-untyped-def]
    with pytest.raises(OmnifleetError) as caught:
        await call
    assert caught.value.reason is Reason.LIMIT_EXCEEDED
    return caught.value


async def test_a_run_holds_no_more_objects_than_its_quota(tmp_path: Path) -> None:
    async with served(tmp_path, quota={"objects": 2}, quotas={"large": {"objects": 3}}) as client:
        digests = [await put(client, seed) for seed in range(4)]
        first = await client.take_lease(digests[:2], "buffer", "small", 60)
        error = await over(client.take_lease(digests[2:3], "buffer", "small", 60))
        assert (error.knob, error.retryable) == ("media.quota.objects", True)
        assert "'small'" in error.message
        await client.take_lease(digests[:2], "other", "small", 60)  # what it holds already counts once
        assert (
            await over(client.take_lease(digests, "buffer", "large", 60))
        ).knob == "media.quotas.large.objects"
        await client.take_lease(digests[:3], "buffer", "large", 60)  # a quota is a run's own
        await client.release_lease(first)
        assert (
            await over(client.take_lease(digests[2:], "buffer", "small", 60))
        ).knob == "media.quota.objects"


async def test_a_run_holds_no_more_bytes_than_its_quota(tmp_path: Path) -> None:
    async with served(tmp_path, quota={"bytes": 2 * BYTES}) as client:
        digests = [await put(client, seed) for seed in range(3)]
        lease = await client.take_lease(digests[:1], "buffer", "run", 60)
        assert (await over(client.take_lease(digests[1:], "buffer", "run", 60))).knob == "media.quota.bytes"
        await client.take_lease(digests[1:2], "buffer", "run", 60)
        await over(client.take_lease(digests[2:], "buffer", "run", 60))
        await client.release_lease(lease)
        await client.take_lease(digests[2:], "buffer", "run", 60)


async def test_sources_count_with_their_size(tmp_path: Path) -> None:
    data = png(0, SIZE)
    async with served(tmp_path, quota={"bytes": len(data) - 1}) as client:
        source = (await client.put(data, "run")).source_digest
        await over(client.take_lease([source], "buffer", "run", 60))


async def test_a_lease_that_ends_makes_room(tmp_path: Path) -> None:
    async with served(tmp_path, quota={"objects": 1}) as client:
        one, two = await put(client, 1), await put(client, 2)
        await client.take_lease([one], "buffer", "run", 0.3)
        async with asyncio.timeout(30):
            while True:
                try:
                    await client.take_lease([two], "buffer", "run", 60)
                    break
                except OmnifleetError as error:
                    assert error.reason is Reason.LIMIT_EXCEEDED
                    await asyncio.sleep(0.05)


async def test_concurrent_leases_of_a_run_do_not_pass_the_quota_together(tmp_path: Path) -> None:
    async with served(tmp_path, quota={"objects": 3}) as client:
        digests = [await put(client, seed) for seed in range(8)]
        outcomes = await asyncio.gather(
            *(client.take_lease([digest], "buffer", "run", 60) for digest in digests), return_exceptions=True
        )
        refused = [outcome for outcome in outcomes if isinstance(outcome, OmnifleetError)]
        assert len(refused) == 5
        assert {error.reason for error in refused} == {Reason.LIMIT_EXCEEDED}


async def test_an_upload_that_would_be_leased_beyond_the_quota_is_refused_and_kept(tmp_path: Path) -> None:
    async with running(tmp_path, quota={"objects": 1}) as service:
        async with (
            MediaClient.open(service.grpc) as client,
            httpx.AsyncClient(base_url=f"http://{service.http}", timeout=60) as http,
        ):
            await client.put(png(1), "run", lease_owner="gym", lease_ttl_ms=60_000)
            error = await over(client.put(png(2), "run", lease_owner="gym", lease_ttl_ms=60_000))
            asked = {"run": "run", "lease_owner": "gym", "lease_ttl_ms": "60000"}
            answer = await http.post("/v1/media", content=png(3), params=asked)
            assert (answer.status_code, answer.json()["error"]["knob"]) == (413, error.knob)
            assert not (await client.put(png(2), "run")).decoded  # it is here, only not leased
