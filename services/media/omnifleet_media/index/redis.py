"""The fleet's index: Redis, one atomic Lua script or command a method, retried while the server is away."""

# ruff: noqa: D102 -- the methods are documented in the port

from __future__ import annotations

import asyncio
import json
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

from redis import exceptions as failures
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Digest, Lease
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index import scripts
from omnifleet_media.index.codec import object_facts, object_from
from omnifleet_media.index.port import BlobName, Claim, Entry, Kind, SegmentRecord, Unit
from omnifleet_media.index.where import without_secrets

log = logging.getLogger("omnifleet.media")

Item = TypeVar("Item")

_PREFIX = "omnifleet:"
_OLDEST = (6, 2)  # ZADD GT, HRANDFIELD
_CONNECTIONS = 16
_CONNECT_S = 2.0
_REPLY_S = 3.0
_PATIENCE_S = 10.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.02, 0.5
_RECENT_MOST = 10_000
_TELLING_S = 86_400
_AWAY = (
    failures.ConnectionError,
    failures.TimeoutError,
    failures.ReadOnlyError,
    failures.TryAgainError,
    failures.MasterDownError,
    OSError,
)
_CLOSED = "the handler is closed"
"""In what uvloop raises, a bare RuntimeError, where one writes to a connection that the other side has just closed."""
_KNOB = "media.index"


class RedisIndex:
    """`omnifleet_media.index.port.Index` in one Redis database.

    Every step may be sent twice, so a lost connection is retried for `patience_s`; then UNAVAILABLE, retryable.
    A full Redis is UNAVAILABLE too. What the disk holds can be told to an empty Redis again (`memory`).
    """

    def __init__(
        self,
        url: str,
        *,
        patience_s: float = _PATIENCE_S,
        reply_s: float = _REPLY_S,
        connections: int = _CONNECTIONS,
    ) -> None:
        """Connects at the first call; `check` says whether the server is fit. Raises INVALID_CONFIG for a bad URL.

        patience_s: how long one step is tried; reply_s: how long one reply may take.
        """
        self._where = without_secrets(url)
        self._patience_s = patience_s
        try:
            pool = BlockingConnectionPool.from_url(
                url,
                decode_responses=True,
                max_connections=connections,
                timeout=reply_s,
                socket_timeout=reply_s,
                socket_connect_timeout=_CONNECT_S,
                retry=Retry(NoBackoff(), 0),
                client_name="omnifleet-media",
            )
        except ValueError as error:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"media.index {self._where}: {error}", knob=_KNOB
            ) from None
        self._redis: Redis = Redis.from_pool(pool)
        self._scripts: dict[str, Any] = {}

    async def check(self) -> None:
        """Refuse a server that would lose entries by design.

        Raises OmnifleetError: INVALID_CONFIG for an evicting policy, an old server or a refused login; UNAVAILABLE.
        """
        info: dict[str, Any] = await self._do(lambda: self._redis.info())
        policy = str(info.get("maxmemory_policy", "noeviction"))
        if policy.startswith("allkeys"):
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"Redis at {self._where} has maxmemory-policy {policy}: it may evict entries that are in use; "
                "set noeviction (or volatile-*)",
                knob="maxmemory-policy",
            )
        version = str(info.get("redis_version", "0.0"))
        if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"Redis at {self._where} is {version}; 6.2 or later is needed",
                knob=_KNOB,
            )
        if not int(info.get("aof_enabled", 0)) and not int(info.get("loading", 0)):
            log.warning(
                "Redis at %s has appendonly off: after a restart the index is told anew from disk",
                self._where,
            )

    # ------------------------------------------------------------------ calls

    async def _do(self, command: Callable[[], Awaitable[Any]]) -> Any:
        """Run to its end even if the caller is cancelled: a reply never meets another's command."""
        return await asyncio.shield(asyncio.ensure_future(self._retried(command)))

    async def _retried(self, command: Callable[[], Awaitable[Any]]) -> Any:
        end, pause = time.monotonic() + self._patience_s, _FIRST_PAUSE_S
        while True:
            try:
                return await command()
            except (*_AWAY, RuntimeError) as error:
                if isinstance(error, RuntimeError) and _CLOSED not in str(error):
                    raise
                if _is_refused_login(error):
                    raise OmnifleetError(
                        Reason.INVALID_CONFIG,
                        f"Redis at {self._where} refuses the login: {error}",
                        knob=_KNOB,
                    ) from None
                if time.monotonic() + pause >= end:
                    raise retryable(
                        Reason.UNAVAILABLE,
                        f"the index at {self._where} does not answer: {type(error).__name__}",
                        knob=_KNOB,
                        retry_after_ms=1000,
                    ) from error
            except failures.RedisError as error:
                raise self._meaning(error) from error
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    def _meaning(self, error: failures.RedisError) -> OmnifleetError:
        if isinstance(error, failures.OutOfMemoryError) or "OOM " in str(error):
            return retryable(
                Reason.UNAVAILABLE,
                f"the index at {self._where} is full: raise maxmemory of Redis or lower media.disk_bytes",
                knob="maxmemory",
                retry_after_ms=1000,
            )
        return OmnifleetError(Reason.INTERNAL, f"index at {self._where}: {error}", knob=_KNOB)

    async def _run(self, script: str, *arguments: str | int) -> Any:
        known = self._scripts.get(script)
        if known is None:
            known = self._scripts[script] = self._redis.register_script(scripts.PRELUDE + script)
        return await self._do(lambda: known(args=[_PREFIX, *arguments]))

    # ------------------------------------------------------------------ reads

    async def find_alias(self, alias: Digest) -> Digest | None:
        found = await self._do(lambda: self._redis.get(f"{_PREFIX}a:{alias}"))
        return Digest(found) if found else None

    async def find_object(self, alias: Digest) -> MediaObject | None:
        body = await self._run(scripts.FIND_OBJECT, alias)
        return object_from(json.loads(body)) if body else None

    async def read_object(self, media: Digest) -> MediaObject | None:
        body = await self._do(lambda: self._redis.hget(f"{_PREFIX}o:{media}", "body"))
        return object_from(json.loads(body)) if body else None

    async def read_frame(self, frame: Digest) -> tuple[int, int] | None:
        found = await self._do(lambda: self._redis.hrandfield(f"{_PREFIX}f:{frame}", 1, withvalues=True))
        if not found:
            return None
        height, width = _flat(found)[1].split()
        return int(height), int(width)

    async def has_source(self, source: Digest) -> bool:
        return bool(await self._do(lambda: self._redis.exists(f"{_PREFIX}s:{source}")))

    async def read_segment(self, key: Digest) -> SegmentRecord | None:
        body = await self._do(lambda: self._redis.hget(f"{_PREFIX}g:{key}", "body"))
        if not body:
            return None
        facts = json.loads(body)
        return SegmentRecord(**{**facts, "grid": tuple(facts["grid"])})

    # ------------------------------------------------------------------ writes

    async def write_source(self, source: Digest, size: int, used_ms: int) -> None:
        await self._run(scripts.WRITE_SOURCE, source, size, used_ms)

    async def write_object(
        self, item: MediaObject, alias: Digest | None, used_ms: int, source: tuple[Digest, int] | None = None
    ) -> None:
        shape = f"{item.height} {item.width}"
        frames = dict.fromkeys(item.frames)
        body = json.dumps(object_facts(item), separators=(",", ":"))
        name, size = source or ("", 0)
        facts = (item.digest, alias or "", body, shape, used_ms, item.bytes, name, size)
        await self._run(scripts.WRITE_OBJECT, *facts, *frames)

    async def write_segment(self, record: SegmentRecord, used_ms: int) -> None:
        body = json.dumps(asdict(record))
        await self._run(scripts.WRITE_SEGMENT, record.key, body, record.media, record.bytes, used_ms)

    async def touch(self, used: Mapping[Entry, int]) -> None:
        for unit in Unit:
            scores = {str(entry.digest): used_ms for entry, used_ms in used.items() if entry.unit is unit}
            for page in _pages(list(scores.items()), 1000):
                await self._touch(unit, dict(page))

    async def _touch(self, unit: Unit, scores: Mapping[str, int]) -> None:
        await self._do(lambda: self._redis.zadd(f"{_PREFIX}use:{unit}", scores, xx=True, gt=True))

    # ------------------------------------------------------------------ leases

    async def take_lease(self, lease: Lease, digests: Sequence[Digest]) -> list[Digest]:
        wanted = dict.fromkeys(digests)
        missing = await self._run(
            scripts.TAKE_LEASE, lease.id, lease.owner, lease.run, lease.expires_unix_ms, *wanted
        )
        return [Digest(digest) for digest in missing]

    async def renew_lease(self, lease_id: str, expires_ms: int, now_ms: int) -> Lease | None:
        found = await self._run(scripts.RENEW_LEASE, lease_id, expires_ms, now_ms)
        return Lease(lease_id, found[0], found[1], expires_ms) if found else None

    async def release_lease(self, lease_id: str) -> bool:
        return bool(await self._run(scripts.RELEASE_LEASE, lease_id))

    async def count_leases(self, digest: Digest | None, now_ms: int) -> int:
        key = f"{_PREFIX}leases" if digest is None else f"{_PREFIX}h:{digest}"
        return int(await self._do(lambda: self._redis.zcount(key, f"({now_ms}", "+inf")))

    async def held(self, run: str, now_ms: int) -> dict[Digest, int]:
        found = await self._run(scripts.HELD, run, now_ms)
        return {Digest(digest): int(size) for digest, size in _pages(found, 2)}

    async def held_blobs(self, names: Sequence[BlobName], now_ms: int) -> set[BlobName]:
        found: set[BlobName] = set()
        for page in _pages(names, 500):
            asked = [part for name in page for part in (str(name.kind), name.digest)]
            answers = await self._run(scripts.HELD_BLOBS, now_ms, *asked)
            found.update(name for name, held in zip(page, answers, strict=True) if held)
        return found

    async def count_objects(self) -> int:
        return int(await self._do(lambda: self._redis.zcard(f"{_PREFIX}use:object")))

    async def recent(self, limit: int) -> list[Digest]:
        last = min(limit, _RECENT_MOST) - 1
        found = await self._do(lambda: self._redis.zrange(f"{_PREFIX}use:object", 0, last, desc=True))
        return [Digest(digest) for digest in found] if last >= 0 else []

    # ------------------------------------------------------------------ eviction

    async def idle(self, now_ms: int, limit: int, skip: int = 0) -> list[Entry]:
        found = await self._run(scripts.IDLE, now_ms, limit + skip, skip)
        return [Entry(Unit(unit), Digest(digest)) for unit, digest in _pages(found, 2)]

    async def forget(self, entry: Entry, now_ms: int) -> list[BlobName] | None:
        found = await self._run(scripts.FORGET, str(entry.unit), entry.digest, now_ms)
        if not found:
            return None
        return [BlobName(Kind(kind), Digest(digest)) for kind, digest in _pages(found, 2)]

    # ------------------------------------------------------------------ flights and stores

    async def take_flight(
        self, key: Digest, owner: str, expires_ms: int, now_ms: int, *, unless_known: bool = False
    ) -> Claim:
        lasts_ms = max(expires_ms - now_ms, 1)
        return Claim(await self._run(scripts.TAKE_FLIGHT, key, owner, lasts_ms, int(unless_known)))

    async def end_flight(self, key: Digest, owner: str) -> None:
        await self._run(scripts.END_FLIGHT, key, owner)

    async def memory(self, store: str) -> str:
        return str(await self._run(scripts.MEMORY, store))

    async def begin_telling(self) -> str:
        return str(await self._run(scripts.BEGIN_TELLING, uuid.uuid4().hex, _TELLING_S))

    async def mark_store(self, store: str, telling: str) -> bool:
        return bool(await self._run(scripts.MARK_STORE, store, telling))

    # ------------------------------------------------------------------ durability

    async def sync(self) -> None:
        """Nothing to wait for: an entry that Redis loses is told anew from the manifest that the disk has synced."""

    async def close(self) -> None:
        await self._redis.aclose()


def _pages(items: Sequence[Item], size: int) -> Iterator[Sequence[Item]]:
    return (items[start : start + size] for start in range(0, len(items), size))


def _flat(pairs: Iterable[Any]) -> list[str]:
    """[field, value] whether the protocol version answers flat or in pairs."""
    return [part for pair in pairs for part in ([pair] if isinstance(pair, str) else pair)]


def _is_refused_login(error: BaseException) -> bool:
    """The client wraps what the server answers to a login in an error of the connection."""
    return (
        isinstance(error, failures.AuthenticationError)
        or "authenticat" in str(error).lower()
        or "WRONGPASS" in str(error)
    )
