"""Several sources a message: each is stored or refused by itself, in order."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omnifleet.client.media import MediaClient, SyncMediaClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.wire import media_pb2
from omnifleet.wire.channel import open_channel
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.media_pb2_grpc import MediaStub
from omnifleet_media.address.contract import still
from omnifleet_media.index.port import Kind
from omnifleet_media.server.library import Library
from tests.chaos.media_light import InstantDecoder, everything_is_whole, light_library, source_of
from tests.contract.media_world import pixels_of, png, running, served

Outcome = media_pb2.PutReply | OmnifleetError


def ref_of(outcome: Outcome) -> MediaRef:
    assert isinstance(outcome, media_pb2.PutReply), outcome
    return MediaRef(MediaKind.IMAGE, Digest(outcome.ref.digest))


async def test_each_source_is_answered_in_its_place(tmp_path: Path) -> None:
    sources = [png(i) for i in range(40)]
    sources[7], sources[20] = b"no picture", sources[3]
    sources[30] += bytes(5 << 20)  # too large for a message: it goes by itself
    async with served(tmp_path) as client:
        outcomes = await client.put_many(sources, "run")
        refused = outcomes[7]
        assert isinstance(refused, OmnifleetError)
        assert refused.reason is Reason.INVALID_MEDIA
        for i, outcome in enumerate(outcomes):
            if i != 7:
                assert (await client.frame(ref_of(outcome)) == pixels_of(sources[i])).all()
        counters = (await client.status()).counters
        assert (counters["puts"], counters["decodes"], counters["objects"]) == (39, 38, 38)
        assert counters["payload_counts/media_putmany/calls"] == 38
        assert await client.put_many([], "run") == []


async def test_each_source_is_leased(tmp_path: Path) -> None:
    async with served(tmp_path) as client:
        outcomes = await client.put_many(
            [png(0), png(1)], "run", lease_owner="me", lease_ttl_ms=60_000, durable=True
        )
        refs = [ref_of(outcome) for outcome in outcomes]
        assert [(await client.stat(ref.digest)).leases for ref in refs] == [1, 1]
        await client.collect(0)
        assert await client.has([ref.digest for ref in refs]) == [True, True]


async def test_a_refusal_that_passes_is_waited_for(tmp_path: Path) -> None:
    sources = [png(i, size=(100, 100)) for i in range(12)]
    limits = {"source_bytes": 40_000, "uploads_bytes": 70_000}  # two at a time
    async with served(tmp_path, limits=limits) as client:
        refs = [ref_of(outcome) for outcome in await client.put_many(sources, "run")]
        assert len({ref.digest for ref in refs}) == 12


async def test_a_message_is_bounded(tmp_path: Path) -> None:
    header = media_pb2.PutHeader(run="run")
    async with running(tmp_path) as service, open_channel(service.grpc) as channel:
        for request in (
            media_pb2.PutManyRequest(header=header, sources=[png()] * 65),
            media_pb2.PutManyRequest(header=media_pb2.PutHeader(url="/etc/passwd"), sources=[png()]),
        ):
            with pytest.raises(OmnifleetError) as caught, remote_errors():
                await MediaStub(channel).PutMany(request, timeout=30)
            assert caught.value.reason is Reason.INVALID_REQUEST


async def test_code_without_an_event_loop_does_the_same(tmp_path: Path) -> None:
    def put(address: str) -> list[Outcome]:
        with SyncMediaClient(address) as client:
            return client.put_many([png(0), b"no picture"], "run")

    async with running(tmp_path) as service:
        stored, refused = await asyncio.to_thread(put, service.grpc)
        async with MediaClient.open(service.grpc) as client:
            assert (await client.frame(ref_of(stored)) == pixels_of(png(0))).all()
    assert isinstance(refused, OmnifleetError)


async def test_frames_that_go_before_the_index_names_them_are_decoded_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As orphans: they are written while the decoder is at the next source."""
    decoder, keep = InstantDecoder(), Library._keep

    def collected(library: Library, *arguments: object) -> object:
        kept = keep(library, *arguments)  # type: ignore[arg-type]
        if decoder.decodes == 1:
            library.store.remove(Kind.FRAME, kept.record.item.frames[0])
        return kept

    monkeypatch.setattr(Library, "_keep", collected)
    async with light_library(tmp_path, decoder) as library:
        stored = await library.put(source_of(1), still(), durable=False)
        assert (stored.new_frames, decoder.decodes) == (1, 2)
        await everything_is_whole(library)
