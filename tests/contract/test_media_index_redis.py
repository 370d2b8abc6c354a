"""Redis going away, coming back, filling up, answering late or not at all: no reference is lost or counted twice."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest
import uvloop
from pydantic import ValidationError

from omnifleet.config.services import MediaConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, Lease, MediaKind
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.port import BlobName, Entry, Kind, Unit
from omnifleet_media.index.redis import RedisIndex
from omnifleet_media.index.where import without_secrets
from tests.contract.media_world import running
from tests.support_redis import RedisServer, redis_server


def digest(name: str) -> Digest:
    return Digest(name.encode().hex().ljust(64, "0"))


SOURCE, ALIAS = digest("source"), digest("alias")
PICTURE = MediaObject(MediaKind.IMAGE, (digest("a"),), 4, 3)


def lease(name: str) -> Lease:
    return Lease(name, "owner", "run", 100)


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with redis_server() as started:
        yield started


@contextlib.asynccontextmanager
async def index_at(url: str, **settings: Any) -> AsyncIterator[RedisIndex]:
    index = RedisIndex(url, **settings)
    try:
        yield index
    finally:
        await index.close()


async def test_a_restart_is_waited_for_and_loses_nothing(server: RedisServer) -> None:
    async with index_at(server.url, patience_s=60) as index:
        await index.write_source(SOURCE, 1, 1)
        await index.take_lease(lease("one"), [SOURCE])
        server.kill()
        asking = asyncio.create_task(index.take_lease(lease("two"), [SOURCE]))
        await asyncio.to_thread(server.start)
        assert await asking == []
        assert await index.count_leases(SOURCE, 50) == 2
        assert await index.release_lease("one")
        assert await index.count_leases(SOURCE, 50) == 1


async def test_what_was_told_is_believed_of_one_life_of_the_server_only(server: RedisServer) -> None:
    async with index_at(server.url, patience_s=60) as index:
        early = await index.begin_telling()
        assert await index.mark_store("disk", await index.begin_telling())
        memory = await index.memory("disk")
        assert memory
        server.kill()
        await asyncio.to_thread(server.start)
        assert await index.memory("disk") == "", "the end of its file may be lost"
        assert not await index.mark_store("disk", early), "half of it was told to the life before"
        assert await index.mark_store("disk", await index.begin_telling())
        assert await index.memory("disk") not in ("", memory)
        between = await index.begin_telling()
        server.ask("FLUSHALL")
        assert not await index.mark_store("disk", between)
        assert await index.memory("disk") == ""


async def test_a_redis_that_stays_away_is_unavailable(server: RedisServer) -> None:
    async with index_at(server.url, patience_s=0.3) as index:
        server.kill()
        with pytest.raises(OmnifleetError) as caught:
            await index.has_source(SOURCE)
    error = caught.value
    assert (error.reason, error.retryable, error.knob) == (Reason.UNAVAILABLE, True, "media.index")


async def test_a_late_reply_is_asked_for_again_and_counts_once(server: RedisServer) -> None:
    async with index_at(server.url, patience_s=60, reply_s=0.3) as index:
        await index.write_source(SOURCE, 1, 1)
        server.ask("CLIENT", "PAUSE", 1200, "ALL")
        assert await index.take_lease(lease("one"), [SOURCE]) == []
        assert await index.count_leases(SOURCE, 50) == await index.count_leases(None, 50) == 1


async def test_dropped_connections_lose_and_double_nothing(server: RedisServer) -> None:
    async with index_at(server.url, patience_s=60) as index:
        await index.write_object(PICTURE, ALIAS, 1)
        done = asyncio.Event()

        async def drop() -> None:
            while not done.is_set():
                await asyncio.to_thread(server.ask, "CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")

        dropping = asyncio.create_task(drop())
        for i in range(24):
            assert await index.take_lease(lease(f"l{i}"), [PICTURE.digest]) == []
            if i % 2:
                await index.release_lease(f"l{i}")
        done.set()
        await dropping
        assert await index.count_leases(PICTURE.digest, 50) == await index.count_leases(None, 50) == 12


def test_a_connection_that_uvloop_finds_closed_is_made_again(server: RedisServer) -> None:
    """It says so by a bare RuntimeError, if the other side goes between our look and our word."""

    async def live() -> None:
        async with index_at(server.url, patience_s=60, connections=1) as index:
            await index.write_source(SOURCE, 1, 1)
            (connection,) = index._redis.connection_pool._available_connections
            looked = connection.can_read

            async def look(*args: Any, **kwargs: Any) -> bool:
                found: bool = await looked(*args, **kwargs)
                connection._writer.transport.abort()
                connection.can_read = looked
                closed.append(found)
                return found

            closed: list[bool] = []
            connection.can_read = look
            assert await index.has_source(SOURCE)
            assert closed == [False]
            with pytest.raises(RuntimeError, match="something else"):
                await index._do(_other_defect)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(live())


async def _other_defect() -> None:
    raise RuntimeError("something else")


class Losing:
    """A proxy on a Unix socket that passes everything on, and swallows the next reply when it is told to."""

    def __init__(self, folder: Path, server: RedisServer) -> None:
        self._path, self._target = folder / "p", str(server.url.removeprefix("unix://").partition("?")[0])
        self.url = f"unix://{self._path}?db=0"
        self.lose = False
        self.lost = 0

    async def __aenter__(self) -> Losing:
        self._server = await asyncio.start_unix_server(self._serve, self._path)
        return self

    async def __aexit__(self, *_: object) -> None:
        self._server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        up, down = await asyncio.open_unix_connection(self._target)
        there = asyncio.create_task(self._pass(reader, down))
        back = asyncio.create_task(self._pass(up, writer, replies=True))
        await asyncio.wait((there, back), return_when=asyncio.FIRST_COMPLETED)
        for task in (there, back):
            task.cancel()
        for end in (writer, down):
            end.close()

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, replies: bool = False
    ) -> None:
        with contextlib.suppress(ConnectionError):
            while data := await reader.read(65536):
                if replies and self.lose:
                    self.lose, self.lost = False, self.lost + 1
                    return
                writer.write(data)


async def test_RED_10_a_lost_reply_changes_no_count(server: RedisServer, tmp_path: Path) -> None:
    folder = Path(server.url.removeprefix("unix://").partition("?")[0]).parent
    async with Losing(folder, server) as proxy, index_at(proxy.url, patience_s=60, connections=1) as index:
        await index.write_source(SOURCE, 1, 1)
        for warm in ("x", "y"):  # the scripts are known now: the next replies are their own
            await index.take_lease(lease(warm), [SOURCE])
            await index.renew_lease(warm, 100, 50)
            await index.release_lease(warm)
        await index.write_object(PICTURE, ALIAS, 1)

        async def losing(step: Any) -> Any:
            proxy.lose = True
            return await step

        await losing(index.write_object(PICTURE, ALIAS, 2))
        assert await index.find_alias(ALIAS) == PICTURE.digest
        for holder in ("one", "two"):
            assert await losing(index.take_lease(lease(holder), [PICTURE.digest])) == []
        assert await index.count_leases(PICTURE.digest, 50) == 2
        assert await losing(index.renew_lease("one", 150, 50)) == Lease("one", "owner", "run", 150)
        assert not await losing(index.release_lease("one"))  # the first try released it
        assert await index.count_leases(PICTURE.digest, 50) == 1
        assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is None
        await losing(index.release_lease("two"))
        assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) == [
            BlobName(Kind.MANIFEST, PICTURE.digest),
            BlobName(Kind.FRAME, PICTURE.frames[0]),
        ]
        assert proxy.lost == 6


async def test_RED_05_a_cancelled_call_leaves_its_reply_to_nobody(server: RedisServer) -> None:
    one, two = digest("one"), digest("two")
    clip = MediaObject(MediaKind.VIDEO, PICTURE.frames, 4, 3, (0,))
    async with index_at(server.url, connections=1) as index:
        await index.write_object(PICTURE, one, 1)
        await index.write_object(clip, two, 1)
        for i in range(1000):
            if i % 200 == 0:
                server.ask("CLIENT", "PAUSE", 50, "ALL")
            asking = asyncio.create_task(index.find_alias(one))
            for _ in range(i % 7):
                await asyncio.sleep(0)
            asking.cancel()
            assert await index.find_alias(two) == clip.digest
            with contextlib.suppress(asyncio.CancelledError):
                assert await asking == PICTURE.digest


async def test_scripts_that_redis_forgot_are_sent_again(server: RedisServer) -> None:
    async with index_at(server.url) as index:
        await index.write_source(SOURCE, 1, 1)
        server.ask("SCRIPT", "FLUSH")
        await index.write_source(SOURCE, 1, 2)
        assert await index.has_source(SOURCE)


@pytest.mark.parametrize("policy", ["allkeys-lru", "allkeys-random"])
async def test_RED_09_a_policy_that_evicts_entries_is_refused(server: RedisServer, policy: str) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", policy)
    async with index_at(server.url) as index:
        with pytest.raises(OmnifleetError) as caught:
            await index.check()
    assert (caught.value.reason, caught.value.knob) == (Reason.INVALID_CONFIG, "maxmemory-policy")
    assert policy in caught.value.message
    server.ask("CONFIG", "SET", "maxmemory-policy", "volatile-lru")
    async with index_at(server.url) as index:
        await index.check()


async def test_RED_09_a_service_does_not_start_on_an_evicting_redis(
    server: RedisServer, tmp_path: Path
) -> None:
    server.ask("CONFIG", "SET", "maxmemory-policy", "allkeys-lfu")
    with pytest.raises(OmnifleetError) as caught:
        async with running(tmp_path, index=server.url):
            pass
    assert caught.value.knob == "maxmemory-policy"
    with pytest.raises(ValidationError, match="index"):
        MediaConfig(index="postgres://host/db")


async def test_RED_09_a_full_redis_refuses_writes_and_keeps_what_it_has(server: RedisServer) -> None:
    async with index_at(server.url) as index:
        await index.write_object(PICTURE, ALIAS, 1)
        await index.take_lease(lease("one"), [PICTURE.digest])
        server.ask("CONFIG", "SET", "maxmemory", 1 << 20)
        with pytest.raises(OmnifleetError) as caught:
            for i in range(20_000):
                await index.write_source(digest(f"s{i}"), 1, i)
        error = caught.value
        assert (error.reason, error.retryable, error.knob) == (Reason.UNAVAILABLE, True, "maxmemory")
        assert error.retry_after_ms > 0
        assert await index.read_object(PICTURE.digest) == PICTURE
        assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is None
        assert await index.release_lease("one")  # what frees memory goes on
        assert await index.forget(Entry(Unit.OBJECT, PICTURE.digest), 50) is not None


async def test_a_wrong_address_is_told_without_its_password() -> None:
    with pytest.raises(OmnifleetError) as caught:
        RedisIndex("redis://user:hush@host:port/0")
    assert caught.value.reason is Reason.INVALID_CONFIG
    assert "hush" not in str(caught.value)
    assert without_secrets("redis://user:hu@sh@host:1/0?x=y") == "redis://host:1/0"
    assert without_secrets("sqlite") == "sqlite"


async def test_a_refused_login_is_a_setting_to_mend(server: RedisServer) -> None:
    server.ask("ACL", "SETUSER", "default", "on", ">right")
    async with index_at(server.url, patience_s=1) as index:
        with pytest.raises(OmnifleetError) as caught:
            await index.check()
    assert (caught.value.reason, caught.value.knob) == (Reason.INVALID_CONFIG, "media.index")
