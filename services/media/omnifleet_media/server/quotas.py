"""Quotas: how much the leases of one run may hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnifleet.config.services import MediaConfig, MediaQuota
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_media.index.port import Index


class Quotas:
    """`media.quota` and `media.quotas` against what the index says that a run holds.

    Content that a run leases twice counts once; content that two runs lease counts for both.
    """

    def __init__(self, config: MediaConfig, index: Index, source_bytes: Callable[[Digest], int]) -> None:
        """source_bytes: size of a stored source, 0 if there is none."""
        self._config, self._index, self._source_bytes = config, index, source_bytes

    async def admit(self, run: str, digests: Sequence[Digest], now_ms: int) -> None:
        """Let a lease pass. Raises OmnifleetError(LIMIT_EXCEEDED), retryable: other leases of the run may end."""
        quota, knob = self._of(run)
        if quota.bytes is None and quota.objects is None:
            return
        held = await self._index.held(run, now_ms)
        new = [digest for digest in dict.fromkeys(digests) if digest not in held]
        objects = len(held) + len(new)
        if quota.objects is not None and objects > quota.objects:
            raise _over(run, f"{objects} objects", quota.objects, f"{knob}.objects")
        if quota.bytes is not None and new:
            size = sum(held.values()) + sum([await self._bytes(digest) for digest in new])
            if size > quota.bytes:
                raise _over(run, f"{size} bytes", quota.bytes, f"{knob}.bytes")

    def _of(self, run: str) -> tuple[MediaQuota, str]:
        own = self._config.quotas.get(run)
        return (own, f"media.quotas.{run}") if own is not None else (self._config.quota, "media.quota")

    async def _bytes(self, digest: Digest) -> int:
        item = await self._index.read_object(digest)
        if item is not None:
            return item.bytes
        segment = await self._index.read_segment(digest)
        return segment.bytes if segment is not None else self._source_bytes(digest)


def _over(run: str, wanted: str, limit: int, knob: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.LIMIT_EXCEEDED,
        f"the leases of run {run!r} would hold {wanted}, at most {limit} are allowed; give leases back or let them end",
        retryable=True,
        knob=knob,
    )
