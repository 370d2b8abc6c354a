"""The order of training: every epoch once through the rows, shuffled by seed and epoch. The ledger is the cursor."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.ledger import Ledger, PromptLease

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow


class Prompts:
    """Leases prompts in order, epoch after epoch, for as long as there are any."""

    def __init__(self, rows: Sequence[PromptRow], ledger: Ledger, *, seed: int, max_epochs: int) -> None:
        """`rows` may be lazy: ids are read once (from `rows.prompt_ids` where there is one), rows when they are due.

        Raises INVALID_CONFIG for no rows or for two rows of one id.
        """
        self._rows = rows
        self._ids: list[str] = getattr(rows, "prompt_ids", None) or [row.prompt_id for row in rows]
        self._places = {prompt_id: place for place, prompt_id in enumerate(self._ids)}
        if len(self._places) != len(rows) or not rows:
            raise invalid(
                f"{len(rows)} training rows have {len(self._places)} different prompt ids",
                knob="data.train",
                reason=Reason.INVALID_CONFIG,
            )
        self._ledger = ledger
        self._seed = seed
        self._max_epochs = max_epochs

    def row(self, prompt_id: str) -> PromptRow:
        """The row of a prompt. Raises INVALID_CONFIG if the data no longer has it: no other prompt would fare better."""
        place = self._places.get(prompt_id)
        if place is None:
            raise invalid(
                f"the ledger knows prompt {prompt_id!r}, the data does not: it changed since the run began",
                knob="data.train, or --fresh",
                reason=Reason.INVALID_CONFIG,
            )
        return self._rows[place]

    def lease(self, *, version: int, ttl_s: float) -> PromptLease | None:
        """The next prompt; None while all are leased or done and no epoch is left."""
        while True:
            leases = self._ledger.lease_next(1, version=version, ttl_s=ttl_s)
            if leases:
                return leases[0]
            epoch = self._ledger.epochs()
            if epoch >= self._max_epochs:
                return None
            self._ledger.add_epoch(epoch, self._order(epoch))

    def ended(self) -> bool:
        """True once no epoch is left and no prompt is pending or out: nothing more will become ready."""
        return self._ledger.epochs() >= self._max_epochs and self._ledger.first_open() is None

    def _order(self, epoch: int) -> list[str]:
        """Rows that know better (a mixture) say what an epoch shows; others are shuffled whole."""
        choose: Callable[[int, int], Sequence[int]] = getattr(self._rows, "epoch_order", self._shuffled)
        return [self._ids[index] for index in choose(self._seed, epoch)]

    def _shuffled(self, seed: int, epoch: int) -> list[int]:
        order: list[int] = np.random.default_rng((seed, epoch)).permutation(len(self._ids)).tolist()
        return order
