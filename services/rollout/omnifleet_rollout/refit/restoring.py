"""Source tensors put together again from parameter memory, where a plan put their slices: the plan read backwards."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch

from omnifleet_refit.windows import View
from omnifleet_rollout.refit.plan import Move, Plan, parameter_memory
from omnifleet_rollout.refit.weights import Weights

Finder = Callable[[str], torch.Tensor | None]
"""Finds a source tensor of the committed version; None if it is not here whole."""


def finder(weights: Weights, plan: Plan | None, model: torch.nn.Module) -> Finder:
    """Looks on the host, in the checkpoint, and in parameter memory. For as long as nothing is committed."""
    restoring: list[Restoring] = []

    def find(name: str) -> torch.Tensor | None:
        tensor = weights.kept(name)
        if tensor is not None or plan is None:
            return tensor
        if not restoring:
            restoring.append(Restoring(plan, model))
        return restoring[0].gather(name)

    return find


class Restoring:
    """Of one plan and model, for as long as the model's parameters are where they are now."""

    def __init__(self, plan: Plan, model: torch.nn.Module) -> None:
        self._shapes, self._targets = plan.shapes, dict(parameter_memory(model))
        self._moves: dict[str, list[Move]] = {}
        for move in plan.moves:
            self._moves.setdefault(move.source, []).append(move)

    def gather(self, name: str) -> torch.Tensor | None:
        """A source tensor, a copy; None if parameter memory does not hold all of it, in one dtype."""
        moves = self._moves.get(name, [])
        dtypes = {self._targets[move.target].dtype for move in moves}
        if len(dtypes) != 1 or not self._covers(name):
            return None
        whole = torch.empty(
            self._shapes[name], dtype=dtypes.pop(), device=self._targets[moves[0].target].device
        )
        for move in moves:
            move.read.on(whole).copy_(move.write.on(self._targets[move.target]))
        return whole

    def all_of(self, table: Mapping[str, tuple[torch.dtype, Sequence[int]]]) -> bool:
        """True if every source can be put together again, in the table's dtype. table: name -> dtype, shape."""
        return all(
            self._covers(name) and all(self._targets[m.target].dtype == dtype for m in self._moves[name])
            for name, (dtype, _) in table.items()
        )

    def _covers(self, name: str) -> bool:
        """True if each element of a source has a place of its own."""
        moves = self._moves.get(name, [])
        if any(move.read.shape != move.write.shape for move in moves):
            return False
        if any(move.read == View.of(torch.empty(self._shapes[name], device="meta")) for move in moves):
            return True
        seen = torch.zeros(self._shapes[name] if moves else 1, dtype=torch.bool)
        for move in moves:
            move.read.on(seen).fill_(True)
        return bool(seen.all())
