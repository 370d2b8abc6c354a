"""What a stage brings, whatever it comes by: whole tensors or slices, verified, and the plan's copies made ready."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from omnifleet_rollout.refit import ipc
from omnifleet_rollout.refit.buckets import DTYPES, Memory
from omnifleet_rollout.refit.collective import Collective
from omnifleet_rollout.refit.filling import fill
from omnifleet_rollout.refit.pieces import Leg, Pieces, as_pieces, legs_of
from omnifleet_rollout.refit.plan import Plan
from omnifleet_rollout.refit.restoring import Finder
from omnifleet_rollout.refit.shadow import (
    LIMIT_ENV,
    ShadowTensor,
    each_tensor,
    no_room,
    rejected,
    shadow_limit,
)
from omnifleet_rollout.refit.source import CUDA_IPC, GROUP, Lent
from omnifleet_rollout.refit.weights import Sources

Pairs = list[tuple[torch.Tensor, torch.Tensor]]
_SLICED = 0.9
"""Of the elements: a rank whose plan reads less keeps slices of whole tensors."""


@dataclass(frozen=True, slots=True)
class Received:
    """What a stage brought.

    sources: whole tensors, none where slices came. names: tensors that change. pairs: the plan's copies. placed: there is no
    shadow, they are in parameter memory already, by plan or by the loader.
    """

    sources: Sources
    pairs: Pairs
    names: frozenset[str]
    bytes: int
    placed: bool = False
    by_plan: bool = False


NOTHING = Received({}, [], frozenset(), 0)


class Reception:
    """Of one rank, `rank` of its engine. Its memory and groups are kept from stage to stage."""

    def __init__(self, model: torch.nn.Module, device: torch.device, rank: int) -> None:
        self._model, self._rank = model, rank
        self.memory = Memory(device, shadow_limit())
        self.collective = Collective(self.memory, rank)

    def legs(self, body: Mapping[str, Any], source: str, plan: Plan | None) -> list[Leg]:
        """The parts that this rank takes, checked; none where tensors come whole. plan: one that is believed.

        Raises REFIT_REJECTED.
        """
        if not body.get("parts"):
            return []
        if plan is None:
            raise rejected("slices came, but this engine's plan is not checked: it takes tensors whole")
        if not source.startswith((GROUP, CUDA_IPC)):
            raise rejected("slices come over groups, or out of memory that is lent")
        return legs_of(body, self._rank, plan.needs())

    def receive(
        self,
        body: Mapping[str, Any],
        source: str,
        legs: Sequence[Leg],
        plan: Plan | None,
        find: Finder,
        *,
        whole: bool,
    ) -> Received:
        """Take what comes, verified. Blocks; for a thread of its own. Raises REFIT_REJECTED, NO_ROOM, UNAVAILABLE,
        DEADLINE.

        legs, plan: see `legs`. find: source tensors of the committed version. whole: the loader will want whole tensors.
        """
        if body.get("parts") and plan is not None:
            return self._slices(body, source, legs, plan)

        def held(name: str) -> torch.Tensor:
            tensor = find(name)
            if tensor is None:
                raise rejected(f"the bytes of {name} are not kept here")
            return tensor

        if source.startswith(GROUP):
            tensors = fill(body, self.collective.receive(body, source), held, self.memory)
        elif source.startswith(CUDA_IPC):
            tensors = fill(body, ipc.receive(body, Lent.parse(source), self.memory), held, self.memory)
        else:
            _check_room(body, self.memory.limit)
            read = each_tensor(body, Path(source), lambda name: as_bytes(held(name)))
            if plan is not None and not whole and plan.share < _SLICED:
                return self._sliced(read, plan)
            tensors = {tensor.name: as_tensor(tensor) for tensor in read}
        pairs = [] if plan is None else self._ready(tensors, lambda: plan.bind(self._model, tensors))
        return Received(tensors, pairs, frozenset(tensors), _size(tensors.values()))

    def _slices(self, body: Mapping[str, Any], source: str, legs: Sequence[Leg], plan: Plan) -> Received:
        if source.startswith(CUDA_IPC):
            tensors = ipc.receive_legs(body, Lent.parse(source), legs, self.memory)
        else:
            tensors = self.collective.receive_legs(body, source, legs)
        names = frozenset(tensor["name"] for tensor in body["tensors"] if tensor["changed"])
        pairs = self._ready(tensors, lambda: plan.bind_pieces(self._model, as_pieces(legs, tensors)))
        return Received({}, pairs, names, _size(tensors.values()))

    def _sliced(self, read: Iterable[ShadowTensor], plan: Plan) -> Received:
        """Of each tensor as it comes, what this rank reads."""
        pieces: Pieces = {}
        names, needs = set(), plan.needs()
        for shadow in read:
            names.add(shadow.name)
            whole = as_tensor(shadow)
            for view in needs.get(shadow.name, ()):
                pieces[shadow.name, view] = view.on(whole).clone(memory_format=torch.contiguous_format)
        return Received({}, plan.bind_pieces(self._model, pieces), frozenset(names), _size(pieces.values()))

    def _ready(self, tensors: Sources, bind: Callable[[], Pairs]) -> Pairs:
        """The plan's copies, made ready before the gate; kept while the tensors lie where they lay."""
        of, pairs = self.memory.derived
        if of is not tensors:
            pairs = bind()
            self.memory.derived = (tensors, pairs)
        return pairs  # type: ignore[no-any-return]


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes, on the host."""
    return tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _check_room(body: Mapping[str, Any], limit: int | None) -> None:
    """Raises NO_ROOM if what changed may not be held on the host."""
    size = sum(tensor["bytes"] for tensor in body["tensors"] if tensor["changed"])
    if limit is not None and size > limit:
        raise no_room(f"no room for a shadow of {size} bytes: {LIMIT_ENV} is {limit}")


def as_tensor(source: ShadowTensor) -> torch.Tensor:
    """What was read of a file, as a tensor on the host."""
    return torch.frombuffer(source.data, dtype=DTYPES[source.dtype]).view(source.shape)


def _size(tensors: Iterable[torch.Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)
