"""What this worker is right now: its weights, whether they are whole, whether it is leaving."""

from __future__ import annotations

import asyncio

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import VersionBound, WeightVersion, WorkerState

FIRST_LABEL = "default"
"""What vLLM calls the weights it started with."""
_LABELS_KEPT = 256


class Standing:
    """Changed by refits and by membership, read by every admission. `changed` wakes whoever reports it."""

    def __init__(self, worker: str, version: WeightVersion) -> None:
        self.worker = worker
        self.version = version
        self.labels = {str(version): version, FIRST_LABEL: version}
        """Names that the engine gives to weights -> the version they are."""
        self.fence = ""
        """Why the weights are not whole; "" while they are."""
        self.note = ""
        """Why the weights are whole but older than those that were here before; "" otherwise."""
        self.shadow = True
        """False once a stage found no room beside the weights, until one does."""
        self.leaving = asyncio.Event()
        """Set once a drain has begun."""
        self.changed = asyncio.Event()

    @property
    def draining(self) -> bool:
        """True once nothing new is taken."""
        return self.leaving.is_set()

    @property
    def state(self) -> WorkerState:
        """What we know of ourselves: engine up and weights whole is CATCHING_UP; only the registry says READY."""
        if self.draining:
            return WorkerState.DRAINING
        if self.fence:
            return WorkerState.STALE
        return WorkerState.CATCHING_UP

    def serve_version(self, version: WeightVersion, note: str = "") -> None:
        """The engine is whole at `version` from now on. note: why, if it was put back to it."""
        self.version, self.fence, self.note = version, "", note
        self.labels[str(version)] = version
        while len(self.labels) > _LABELS_KEPT:
            del self.labels[next(iter(self.labels))]
        self.changed.set()

    def raise_fence(self, why: str) -> None:
        """Serve nothing until a complete refit commits."""
        self.fence = why
        self.changed.set()

    def start_drain(self) -> None:
        """Take nothing new from now on. Idempotent."""
        self.leaving.set()
        self.changed.set()

    def check_serving(self) -> None:
        """Raises DRAINING or FENCED, both retryable on another worker."""
        if self.draining:
            raise retryable(Reason.DRAINING, f"{self.worker} is draining and takes nothing new")
        if self.fence:
            raise retryable(
                Reason.FENCED, f"{self.worker} is fenced until its next complete refit: {self.fence}"
            )

    def check_bound(self, bound: VersionBound) -> None:
        """Raises VERSION_TOO_OLD if the weights are behind the bound, VERSION_MOVED if they are past an exact one."""
        if bound.admits(self.version):
            return
        exact = bound.exact
        passed = exact is not None and self.version.same_lineage(exact) and self.version.number > exact.number
        raise OmnifleetError(
            Reason.VERSION_MOVED if passed else Reason.VERSION_TOO_OLD,
            f"{self.worker} serves {self.version}; the request asked for "
            + (f"exactly {exact}" if exact is not None else f"at least {bound.min}"),
            retryable=True,
            knob="weight_version",
            current_version=self.version,
        )
