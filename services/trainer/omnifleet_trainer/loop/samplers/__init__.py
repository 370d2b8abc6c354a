"""Which ready groups a step takes: one file a rule. A rule sees descriptions of groups, never their samples."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from omnifleet_trainer.ledger import ReadyGroup
from omnifleet_trainer.loop.samplers.fifo import fifo
from omnifleet_trainer.loop.samplers.freshest import freshest
from omnifleet_trainer.loop.samplers.in_order import in_order

Sampler = Callable[[Sequence[ReadyGroup], int, tuple[int, int] | None], list[ReadyGroup]]
"""(ready, in order of arrival; groups needed; place of the first unfinished prompt or None) -> at most `needed`."""

SAMPLERS: dict[str, Sampler] = {"fifo": fifo, "freshest": freshest, "in_order": in_order}

__all__ = ["SAMPLERS", "Sampler", "fifo", "freshest", "in_order"]
