"""Ready groups between rollouts and steps. The ledger holds them; this is the waiting and the bound."""

from __future__ import annotations

from collections.abc import Callable

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Group, Outcome
from omnifleet_trainer.ledger import Ledger, PromptLease, ReadyGroup
from omnifleet_trainer.loop.admission import Admission
from omnifleet_trainer.loop.pulse import Pulse
from omnifleet_trainer.loop.samplers import Sampler


def check_buffer(capacity: int, needed: int) -> None:
    """Refuse a buffer that can never fill a step. Raises INVALID_CONFIG."""
    if capacity < needed:
        raise invalid(
            f"the buffer holds {capacity} groups, a step needs {needed}: it would wait for ever",
            knob="trainer.buffer_groups",
            reason=Reason.INVALID_CONFIG,
        )


class ReadyBuffer:
    """Puts what rollouts bring into the ledger and takes what a step needs; both keep the credits in step."""

    def __init__(
        self,
        ledger: Ledger,
        admission: Admission,
        sampler: Sampler,
        *,
        needed: int,
        max_staleness: int,
        counters: Counters,
    ) -> None:
        """needed: groups of a step. max_staleness: largest lag of a group's oldest token, in steps."""
        self._ledger = ledger
        self._admission = admission
        self._sampler = sampler
        self._needed = needed
        self._max_staleness = max_staleness
        self._counters = counters
        self.changed = Pulse()

    def put(self, lease: PromptLease, group: Group) -> None:
        """A rollout is done. If its lease ran out meanwhile, its prompt is somebody else's and the group is dropped."""
        try:
            self._ledger.record_group(lease, group)
        except OmnifleetError as error:
            self._came_late(error)
        else:
            self._counters.add("groups_ready")
            self._admission.accepted()
        self.changed.fire()

    def fail(self, lease: PromptLease, outcome: Outcome, error: str, *, limit: int) -> None:
        """A rollout ended without a group; its prompt is pending again, or given up at the `limit`-th fault of its own."""
        try:
            if self._ledger.fail_attempt(lease, outcome, error, limit=limit):
                self._counters.add("prompts_given_up")
        except OmnifleetError as conflict:
            self._came_late(conflict)
        else:
            self._admission.returned()
        self.changed.fire()

    def _came_late(self, error: OmnifleetError) -> None:
        self._admission.returned()
        if error.reason is not Reason.CONFLICT:
            raise error
        self._counters.add("groups_late")

    async def take(
        self, version: int, *, ended: Callable[[], bool], paused: Callable[[], bool], timeout: float
    ) -> list[ReadyGroup]:
        """Wait for the groups of a step that trains weights `version`; fewer than needed only once `ended` is true.

        Nothing is taken while `paused`. Raises DEADLINE after `timeout` seconds.
        """

        def enough() -> tuple[list[ReadyGroup]] | None:  # wrapped: no groups at all may also be the answer
            if paused():
                return None
            picked = self._pick(version)
            return (picked,) if len(picked) == self._needed or ended() else None

        try:
            found = await self.changed.until(enough, timeout=timeout)
        except TimeoutError:
            raise OmnifleetError(
                Reason.DEADLINE,
                f"{len(self._ledger.ready())} of {self._needed} groups became ready within {timeout:.0f} s "
                f"({self._admission.running} are running)",
                retryable=True,
                knob="trainer.step_timeout_s",
            ) from None
        return found[0] if found else []

    def _pick(self, version: int) -> list[ReadyGroup]:
        ready = self._ledger.ready()
        stale = [group.id for group in ready if version - group.oldest_version > self._max_staleness]
        if stale:
            self._ledger.expire_stale(stale)
            self._admission.expired(len(stale))
            self._counters.add("groups_expired", len(stale))
            self.changed.fire()
        fresh = [group for group in ready if group.id not in stale]
        return self._sampler(fresh, self._needed, self._ledger.first_open())
