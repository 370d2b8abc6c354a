"""The refit protocol on a worker: stage while the old version serves, gate, commit; abort before, fence after."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet_rollout.engine.port import Engine
from omnifleet_rollout.refit.claims import Staged, check_all, checked
from omnifleet_rollout.refit.clearing import Clearing
from omnifleet_rollout.refit.shadow import rejected
from omnifleet_rollout.worker.gate import Ending, Gate
from omnifleet_rollout.worker.rest import Rest

log = logging.getLogger("omnifleet.rollout.refit")
Result = TypeVar("Result")
DEFAULT_DEADLINE_S = 120.0
_BREAKS = (OmnifleetError, RuntimeError, ValueError, LookupError, OSError, TypeError, AssertionError)
"""What an engine may raise in the middle of a load."""


@dataclass(frozen=True, slots=True)
class Committed:
    """gate_seconds: how long no token was produced. in_flight: samples that were running at the gate."""

    version: WeightVersion
    gate_seconds: float
    in_flight: int
    tensors_loaded: int


class Receiver:
    """One refit at a time. The property it keeps: while the worker serves, the engine holds exactly one committed version."""

    def __init__(self, engine: Engine, gate: Gate, counters: Counters) -> None:
        self._engine, self._gate, self._counters = engine, gate, counters
        self._standing = gate.standing
        self._staged: Staged | None = None
        self._staging: str | None = None
        """Digest of the manifest whose stage runs."""
        self._manifest: refit_pb2.Manifest | None = None
        """Of the version that was committed last."""
        self._refused: tuple[WeightVersion, str] | None = None
        """The version that was quarantined last, and why."""
        self._done: tuple[str, Committed] | None = None
        """What was staged for the last commit, and its outcome."""
        self.rest = Rest(engine, gate)
        self._clearing = Clearing(engine, gate, self.rest)
        self._busy = asyncio.Lock()
        self._steps: set[asyncio.Task[Any]] = set()

    async def stage(
        self,
        manifest: refit_pb2.Manifest,
        source: str,
        deadline_s: float = 0.0,
        in_place: InFlight | None = None,
    ) -> tuple[str, int]:
        """Verify and copy a transfer into the shadow; (manifest digest, bytes).

        in_place: where there is no room, take it straight into place and serve it; one rank that is fenced does so anyway.
        Raises REFIT_REJECTED, NO_ROOM, CONFLICT, DEADLINE; in place FENCED.
        """
        limit_s = deadline_s or DEFAULT_DEADLINE_S
        return await self._alone(
            lambda: self._stage(manifest, source, in_place, limit_s), deadline_s, "stage"
        )

    async def adopt(
        self, version: WeightVersion, original: refit_pb2.Manifest, manifest: refit_pb2.Manifest, source: str
    ) -> str:
        """Stage weights from a peer: `manifest` describes the bytes, `original` made the version that they are.

        The caller has proved the bytes by `original`. Returns the digest to commit. Raises as `stage`.
        """
        return await self._alone(lambda: self._adopt(version, original, manifest, source), 0.0, "stage")

    @property
    def quarantined(self) -> bool:
        """True from a quarantine until a newer version commits: weights of that version are not to be had from peers."""
        return self._refused is not None

    @property
    def receiving(self) -> bool:
        """True while a step of a refit runs."""
        return self._busy.locked()

    @property
    def holds_stage(self) -> bool:
        """True while something is staged and not committed."""
        return self._staged is not None

    def serves(self) -> tuple[WeightVersion | None, refit_pb2.Manifest | None]:
        """The version that is whole here, None if there is none, and the manifest that made it, None for the checkpoint's."""
        if self._standing.fence:
            return None, None
        return self._standing.version, self._manifest

    async def commit(self, digest: str, policy: InFlight, deadline_s: float = 0.0) -> Committed:
        """Make the staged version serve. Once begun it runs to its end even if the caller goes away.

        Raises REFIT_REJECTED (nothing such staged), DEADLINE (before the gate: the old version serves on),
        or FENCED: the weights may be mixed and the worker serves nothing until a complete refit.
        """
        deadline_s = deadline_s or DEFAULT_DEADLINE_S
        return await self._alone(lambda: self._commit(digest, policy, deadline_s), 0.0, "commit")

    async def sleep(self, level: int, deadline_s: float = 0.0) -> int:
        """Give the device up; see `Rest.sleep`. Raises CONFLICT while a step of a refit runs, DEADLINE."""
        return await self._alone(lambda: self.rest.sleep(level), deadline_s, "sleep")

    async def wake(self, *, weights_only: bool, deadline_s: float = 0.0) -> None:
        """Take it back; see `Rest.wake`. Raises CONFLICT while a step of a refit runs, DEADLINE."""
        await self._alone(lambda: self.rest.wake(weights_only=weights_only), deadline_s, "wake")

    async def abort(self, digest: str) -> WeightVersion:
        """Drop what is staged, or end a stage that runs; the version that serves.

        Idempotent; another digest's stage is left alone. A commit that runs is not: CONFLICT.
        """
        staging = self._staging
        if staging is not None and digest in ("", staging):
            await self._engine.drop_stage()
            async with self._busy:  # the stage ends now; even if it had just succeeded, the shadow is empty
                self._staged = None
                return self._standing.version
        return await self._alone(lambda: self._abort(digest), 0.0, "abort")

    async def quarantine(self, reason: str) -> WeightVersion:
        """Serve nothing from now on until a complete refit: running requests end with FENCED. Idempotent."""
        if not self._standing.fence:
            self._standing.raise_fence(reason)
            self._refused = self._standing.version, reason
            self._counters.add("refits_quarantined")
            log.error("quarantined at %s: %s", self._standing.version, reason)
            await self._clearing.end(Ending.FENCED)
        return self._standing.version

    async def _alone(self, step: Callable[[], Awaitable[Result]], deadline_s: float, what: str) -> Result:
        """Run one step to its end, unbroken by the caller's cancellation. Raises CONFLICT if another one runs."""
        task = asyncio.create_task(self._locked(step, what), name=f"refit {what}")
        self._steps.add(task)  # the loop alone would not keep a step alive whose caller went away
        task.add_done_callback(self._ended)
        try:
            async with asyncio.timeout(deadline_s or None):
                return await asyncio.shield(task)
        except TimeoutError:
            raise retryable(
                Reason.DEADLINE, f"{what} took longer than {deadline_s:.1f} s and goes on"
            ) from None

    def _ended(self, task: asyncio.Task[Any]) -> None:
        """A step whose caller is gone fails unheard, but for the log."""
        self._steps.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.info("%s: %s", task.get_name(), error)

    async def _locked(self, step: Callable[[], Awaitable[Result]], what: str) -> Result:
        if self._busy.locked():
            raise retryable(
                Reason.CONFLICT, f"cannot {what}: another refit step is running", retry_after_ms=100
            )
        async with self._busy:
            return await step()

    async def _stage(
        self, manifest: refit_pb2.Manifest, source: str, in_place: InFlight | None, deadline_s: float
    ) -> tuple[str, int]:
        version, body = checked(manifest, self._standing)
        staged = Staged(version.manifest_digest, version, manifest, manifest.encoder_changed)
        return staged.digest, await self._bring(staged, body, source, in_place, deadline_s)

    async def _adopt(
        self, version: WeightVersion, original: refit_pb2.Manifest, manifest: refit_pb2.Manifest, source: str
    ) -> str:
        if self.quarantined:
            raise rejected(f"{self._standing.worker} is quarantined; only the trainer may send it weights")
        copy, body = checked(manifest, self._standing)
        staged = Staged(copy.manifest_digest, version, original, encoder_changed=True)
        in_place = InFlight.RECOMPUTE if self._standing.fence else None
        await self._bring(staged, body, source, in_place, DEFAULT_DEADLINE_S)
        return staged.digest

    async def _bring(
        self, staged: Staged, body: bytes, source: str, in_place: InFlight | None, deadline_s: float
    ) -> int:
        """Into the shadow; where there is no room, in place, if that is allowed or nothing serves anyway. Bytes."""
        self.rest.check_weights()
        several = self._engine.facts.ranks > 1
        if (
            in_place is None or not several
        ):  # of several, those with room would wait in the group for the others
            try:
                size = await self._fill(staged.digest, body, source)
                self._staged, self._standing.shadow = staged, True
                return size
            except OmnifleetError as error:
                if error.reason is not Reason.NO_ROOM:
                    raise
                self._standing.shadow = False
                if in_place is None and (several or not self._standing.fence):
                    raise
        check_all(body, self._engine.facts.tensors)  # while there is something to lose
        return await self._place(staged, body, source, in_place or InFlight.RECOMPUTE, deadline_s)

    async def _place(
        self, staged: Staged, body: bytes, source: str, policy: InFlight, deadline_s: float
    ) -> int:
        """Without a shadow: fenced until all is in place, verified and committed; bytes."""
        size = 0

        async def place() -> None:
            nonlocal size
            self._standing.raise_fence(f"it takes {staged.version} without a shadow")
            self._clearing.reopen()  # who waits there goes elsewhere
            size = await self._fill(staged.digest, body, source, in_place=True)

        try:
            await self._clearing.clear(policy, deadline_s / 2)
            await self._swap(staged, policy, place)
        finally:
            self._clearing.reopen()
        self._counters.add("refits_in_place")
        return size

    async def _fill(self, digest: str, body: bytes, source: str, *, in_place: bool = False) -> int:
        """Have the engine fill its shadow, or take it all straight into place; bytes."""
        self._staged, self._staging = None, digest
        began = time.monotonic()
        try:
            size = await self._engine.stage(body.decode(), source, in_place=in_place)
        finally:
            self._staging = None
        self._counters.add("refit_stage_seconds", time.monotonic() - began)
        self._counters.add("refit_bytes", size)
        return size

    async def _abort(self, digest: str) -> WeightVersion:
        if self._staged is not None and digest in ("", self._staged.digest):
            self._staged = None
            await self._engine.drop_stage()
        return self._standing.version

    async def _commit(self, digest: str, policy: InFlight, deadline_s: float) -> Committed:
        staged = self._staged
        if staged is None or staged.digest != digest:
            if self._done is not None and digest == self._done[0] and not self._standing.fence:
                return self._done[1]  # it was taken in place, or the reply to an earlier commit was lost
            raise rejected(f"no refit {digest[:12] or '(no digest)'} is staged here")
        self.rest.check_weights()
        try:
            await self._clearing.clear(policy, deadline_s)
            return await self._swap(staged, policy)
        finally:
            self._clearing.reopen()

    async def _swap(
        self, staged: Staged, policy: InFlight, place: Callable[[], Awaitable[None]] | None = None
    ) -> Committed:
        """Load what is staged; or what `place`, which runs first, has put into place already."""
        running, began = self._clearing.running, time.monotonic()
        async with self._clearing.still():
            loaded = await self._load(staged, policy, place)
        seconds = time.monotonic() - began
        self._counters.add("refits")
        self._counters.add("refit_gate_seconds", seconds)
        self._counters.add("refits_with_requests_running", float(running > 0))
        log.info("refit to %s: gate %.0f ms, %d samples in flight", staged.version, seconds * 1000, running)
        committed = Committed(staged.version, seconds, running, loaded)
        self._done = staged.digest, committed
        return committed

    async def _load(
        self, staged: Staged, policy: InFlight, place: Callable[[], Awaitable[None]] | None
    ) -> int:
        version = staged.version
        self._staged = None
        try:
            if place is not None:
                await place()
            loaded = await self._engine.commit(
                staged.digest, str(version), policy, encoder_changed=staged.encoder_changed
            )
        except _BREAKS as error:
            untouched = isinstance(error, OmnifleetError) and error.reason is Reason.REFIT_REJECTED
            if untouched and place is None:
                raise  # by the engine's promise nothing has changed
            self._standing.raise_fence(f"refit to {version} failed while loading: {error}")
            self._counters.add("refits_fenced")
            log.error("fenced: %s", self._standing.fence)
            await self._clearing.end(Ending.FENCED)
            raise retryable(Reason.FENCED, self._standing.fence) from error
        self._manifest = staged.manifest
        self._standing.serve_version(version, self._put_back(version))
        return loaded

    def _put_back(self, version: WeightVersion) -> str:
        """Why we are at a version older than the one that was quarantined; "" if we are not, which settles that one."""
        if self._refused is None:
            return ""
        refused, reason = self._refused
        if not version.same_lineage(refused) or version.number >= refused.number:
            self._refused = None
            return ""
        self._counters.add("refits_rolled_back")
        note = f"put back from {refused} to {version}: {reason}"
        log.error("%s", note)
        return note
