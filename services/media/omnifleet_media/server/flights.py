"""Single-flight between processes: whoever claims a key in the index first makes it, the others wait for the result.

A claim is advice, not a lock: it runs out when its owner dies or stalls, and what two processes then both make is the
same content under the same address.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from typing import TypeVar

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Digest
from omnifleet_media.index.port import Claim, Index
from omnifleet_media.server.retention import now_ms

Value = TypeVar("Value")

log = logging.getLogger("omnifleet.media")

_CLAIM_MS = 6000
_RENEW_S = 1.5
_PATIENCE_S = 120.0
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.01, 0.25


class Flights:
    """Claims of this process."""

    def __init__(self, index: Index, claim_ms: int = _CLAIM_MS) -> None:
        """claim_ms: how long a dead owner's claim holds the others up."""
        self._index = index
        self._owner = uuid.uuid4().hex
        self._claim_ms = claim_ms
        self._renew_s = min(_RENEW_S, claim_ms / 4000)
        self._renewing: dict[Digest, asyncio.TimerHandle] = {}
        self._prolonging: dict[Digest, asyncio.Task[None]] = {}

    async def find_or_make(
        self,
        key: Digest,
        find: Callable[[], Awaitable[Value | None]],
        make: Callable[[], Awaitable[Value]],
    ) -> tuple[Value, bool]:
        """What `find` finds, now or once another process made it, or what `make` makes; True: made here.

        `make` writes `key` to the index, as an alias or a segment, which ends the claim.

        Raises what `make` raises; OmnifleetError(OVERLOADED), retryable, after two minutes of waiting for others.
        """
        end, pause = time.monotonic() + _PATIENCE_S, _FIRST_PAUSE_S
        while True:
            claim = await self._claim(key, unless_known=True)
            if claim is Claim.KNOWN:
                found = await find()
                if found is not None:
                    return found, False
                claim = await self._claim(key)  # known, but its bytes are lost
            if claim is not Claim.OTHERS:
                return await self._fly(key, find if claim is Claim.KNOWN else None, make)
            if time.monotonic() >= end:
                raise retryable(
                    Reason.OVERLOADED, f"another service has been making {key} for {_PATIENCE_S:.0f} s"
                )
            await asyncio.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE_S)

    async def _fly(
        self,
        key: Digest,
        find_again: Callable[[], Awaitable[Value | None]] | None,
        make: Callable[[], Awaitable[Value]],
    ) -> tuple[Value, bool]:
        renewing = asyncio.get_running_loop().call_later(self._renew_s, self._keep_claim, key)
        self._renewing[key] = renewing
        held = True
        try:
            found = await find_again() if find_again else None
            if found is not None:  # another had finished between our look and our claim
                return found, False
            made = await make()
            held = False
            return made, True
        finally:
            self._renewing.pop(key).cancel()
            if (prolonging := self._prolonging.pop(key, None)) is not None:
                await asyncio.wait((prolonging,))  # it may have brought the claim back
            if held or prolonging is not None:
                await self._give_up(key)

    async def _claim(self, key: Digest, *, unless_known: bool = False) -> Claim:
        now = now_ms()
        expires = now + self._claim_ms
        return await self._index.take_flight(key, self._owner, expires, now, unless_known=unless_known)

    def _keep_claim(self, key: Digest) -> None:
        loop = asyncio.get_running_loop()
        self._renewing[key] = loop.call_later(self._renew_s, self._keep_claim, key)
        self._prolonging[key] = loop.create_task(self._prolong(key))

    async def _prolong(self, key: Digest) -> None:
        try:
            await self._claim(key)
        except OmnifleetError as error:
            log.warning("a claim could not be prolonged: %s", error)

    async def _give_up(self, key: Digest) -> None:
        try:
            await self._index.end_flight(key, self._owner)
        except OmnifleetError as error:
            log.warning("a claim is left to run out: %s", error)
