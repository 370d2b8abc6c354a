"""Who has the devices: the trainer, or the engines. A trainer with devices of its own takes no turns.

A step goes: engines sleep, the policy comes to the device, trains, leaves it; the engines' weights wake, the refit is
committed, the rest of the engines wakes. Replies that were running go on from the tokens that they have.
"""

from __future__ import annotations

from typing import Protocol


class Turns(Protocol):
    """Each call returns once the devices have changed hands; metrics are seconds, turn/WHAT_s. All are idempotent.

    Raises OmnifleetError(DEADLINE) if they do not within trainer.turn_timeout_s.
    """

    async def train(self) -> dict[str, float]:
        """The engines sleep and the policy is on its device."""
        ...

    async def refit(self) -> dict[str, float]:
        """The policy left the device, and the engines' weights have memory: a refit may be committed."""
        ...

    async def generate(self) -> dict[str, float]:
        """The engines are awake."""
        ...


class Apart:
    """Trainer and engines have devices of their own: nothing changes hands."""

    async def train(self) -> dict[str, float]:
        """See `Turns`."""
        return {}

    async def refit(self) -> dict[str, float]:
        """See `Turns`."""
        return {}

    async def generate(self) -> dict[str, float]:
        """See `Turns`."""
        return {}
