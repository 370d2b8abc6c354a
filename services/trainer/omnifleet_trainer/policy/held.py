"""How a checkpoint's tensors lie in a model: each as it is, cut (query, key and value of one tensor), or stacked (experts).

transformers renames, cuts and stacks while it loads, and can undo that (`revert_weight_conversion`). Its undoing is done
here to tensors without memory, which come back as they are where nothing but names changed, and to small ones whose entries
say where they came from: so no family is spelled out, no weight is copied for it, and optimiser state goes the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from omnifleet.errors import OmnifleetError, Reason, invalid

_SHOWN = 6


@dataclass(frozen=True, slots=True)
class Piece:
    """Of a checkpoint's tensor, what one tensor of the model holds: `rows` of its first axis; with `entry` all of it,
    as that entry of the model's first axis. turned: its last two axes are the other way round in the model."""

    name: str
    rows: int
    entry: int | None = None
    turned: bool = False


class Held:
    """Model names and checkpoint names. pieces: of each tensor of the checkpoint, first row first."""

    def __init__(self, pieces: Mapping[str, tuple[Piece, ...]]) -> None:
        self._pieces = dict(pieces)
        self._sources: dict[str, list[str]] = {}
        for source, parts in self._pieces.items():
            for piece in parts:
                self._sources.setdefault(piece.name, []).append(source)
        for sources in self._sources.values():
            sources.sort(key=lambda source: self._pieces[source][0].entry or 0)

    def __contains__(self, name: object) -> bool:
        """Whether a tensor of the model is in the checkpoint."""
        return name in self._sources

    @property
    def names(self) -> list[str]:
        """The model's tensors that are in the checkpoint."""
        return list(self._sources)

    def sources(self, name: str) -> list[str]:
        """The checkpoint's tensors that a tensor of the model holds, or holds rows of."""
        return self._sources[name]

    def all_sources(self, names: Iterable[str]) -> set[str]:
        """Of several."""
        return {source for name in names for source in self._sources[name]}

    def collected(
        self, names: Iterable[str], tensor: Callable[[str], Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        """(checkpoint name, tensor) of what the model's tensors `names` hold completely, one at a time.

        tensor: gives a whole tensor of the model; may be collective, ranks ask in the same order.
        """
        wanted = list(names)
        known = set(wanted)
        for name in wanted:
            stacked: Tensor | None = None
            for source in self._sources.get(name, ()):
                pieces = self._pieces[source]
                if pieces[0].name != name or any(piece.name not in known for piece in pieces):
                    continue
                if pieces[0].entry is not None:
                    stacked = tensor(name) if stacked is None else stacked
                    yield source, stacked[pieces[0].entry]
                elif len(pieces) == 1:
                    yield source, tensor(name).mT.contiguous() if pieces[0].turned else tensor(name)
                else:
                    yield source, torch.cat([tensor(piece.name) for piece in pieces])

    def rebuilt(self, name: str, stored: Callable[[str], Tensor]) -> Tensor:
        """A whole tensor of the model from the checkpoint's."""
        sources = self._sources[name]
        if self._pieces[sources[0]][0].entry is not None:
            return torch.stack([stored(source) for source in sources])
        start = 0
        for piece in self._pieces[sources[0]]:
            if piece.name == name:
                break
            start += piece.rows
        whole = stored(sources[0])
        if piece.turned:
            return whole.mT
        return whole if len(self._pieces[sources[0]]) == 1 else whole[start : start + piece.rows]

    def frozen(self, names: Iterable[str], frozen: set[str]) -> set[str]:
        """The model's tensors of `names` that checkpoint names `frozen` keep from training.

        Raises OmnifleetError(INVALID_CONFIG) if they name some and not all of what lies in one tensor.
        """
        found = set()
        for name in names:
            sources = self._sources[name]
            fixed = [source for source in sources if source in frozen]
            if fixed and len(fixed) < len(sources):
                raise invalid(
                    f"model.freeze names {fixed[0]} and not {next(s for s in sources if s not in frozen)}, which "
                    "are one weight in memory: name all or none",
                    knob="model.freeze",
                    reason=Reason.INVALID_CONFIG,
                )
            found |= {name} if fixed else set()
        return found


def held_by(
    model: Any,
    shapes: Mapping[str, tuple[int, ...]],
    *,
    fixed: Sequence[str] = (),
    passive: Sequence[str] = (),
) -> Held:
    """How the tensors of a checkpoint (name -> shape) lie in a transformers model.

    fixed: patterns of the model's tensors that no checkpoint holds. passive: patterns of the checkpoint's that no model
    holds. A tied head that the checkpoint does not store is left out. Raises OmnifleetError(UNSUPPORTED) if the two sides
    do not hold the same tensors otherwise: a refit would then be incomplete.
    """
    from transformers.core_model_loading import revert_weight_conversion

    state = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items() if ".lora_" not in name}
    probes = _Probes(state)
    alike = {name: torch.empty(shape, device="meta") for name, shape in state.items()}
    owners = {id(tensor): name for name, tensor in alike.items()}
    pieces: dict[str, tuple[Piece, ...]] = {}
    for source, tensor in revert_weight_conversion(model, dict(alike)).items():
        name = owners.get(id(tensor))
        if name is not None and shapes.get(source) == state[name]:  # at most renamed
            pieces[source] = (Piece(name, probes.rows(name)),)
        elif name is not None and ".experts." in source and shapes.get(source) == _turned(state[name]):
            pieces[source] = (Piece(name, probes.rows(name), turned=True),)
    if any(parts[0].turned for parts in pieces.values()):  # of equal sides no shape tells
        pieces = {s: parts for s, parts in pieces.items() if parts[0].turned or not _square(shapes[s])}
    for source, probe in revert_weight_conversion(model, dict(probes.tensors)).items():
        parts = probes.read(probe, shapes[source]) if source in shapes.keys() - pieces.keys() else None
        if parts is not None:
            pieces[source] = parts
    covered: dict[str, int] = {}
    for parts in pieces.values():
        for piece in parts:
            rows = 1 if piece.entry is not None else piece.rows
            covered[piece.name] = covered.get(piece.name, 0) + rows
    whole = {name for name, rows in covered.items() if rows == probes.rows(name)}
    missing = sorted(
        s
        for s in shapes
        if not (s in pieces and all(p.name in whole for p in pieces[s])) and not _any(s, passive)
    )
    tied = getattr(model, "_tied_weights_keys", None) or {}
    extra = sorted(name for name in state if name not in whole | set(tied) and not _any(name, fixed))
    if missing or extra:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{type(model).__name__} and its checkpoint hold different tensors: only in the checkpoint "
            f"{missing[:_SHOWN]}, only in the model {extra[:_SHOWN]}",
            knob="model.path",
        )
    return Held(pieces)


class _Probes:
    """A small tensor for each of the model's: as many rows, every other axis of a length of its own, every entry unlike
    all others. So a tensor made of rows of them tells which, and none passes that was turned."""

    def __init__(self, state: Mapping[str, tuple[int, ...]]) -> None:
        self._state = state
        self.tensors: dict[str, Tensor] = {}
        self._owners: dict[int, str] = {}
        start = 0
        for name, shape in state.items():
            small = (*shape[:1], *range(2, 1 + len(shape)))
            size = math.prod(small)
            self.tensors[name] = torch.arange(start, start + size).reshape(small)
            width = size // small[0] if small and small[0] else size
            self._owners |= {start + row * width: name for row in range(self.rows(name))}
            start += size

    def rows(self, name: str) -> int:
        """Of the model's tensor; 1 of a number."""
        return self._state[name][0] if self._state[name] else 1

    def read(self, probe: Tensor, shape: tuple[int, ...]) -> tuple[Piece, ...] | None:
        """What a tensor that was made of probes consists of; None if it is neither rows nor one entry, or its real
        `shape` does not fit."""
        name = self._owners.get(int(probe.flatten()[0])) if probe.numel() else None
        if name is None:
            return None
        small, real = self.tensors[name], self._state[name]
        if probe.ndim == small.ndim - 1 and probe.shape == small.shape[1:] and shape == real[1:]:
            entry = int(probe.flatten()[0] - small.flatten()[0]) // math.prod(probe.shape)
            return (Piece(name, 1, entry),) if torch.equal(small[entry], probe) else None
        pieces, at = [], 0
        while at < (len(probe) if probe.ndim else 1):
            first = probe.flatten()[at * math.prod(probe.shape[1:])]
            name = self._owners.get(int(first))
            rows = 0 if name is None else self.rows(name)
            if name is None or not torch.equal(
                probe[at : at + rows] if probe.ndim else probe, self.tensors[name]
            ):
                return None
            if self._state[name][1:] != shape[1:]:
                return None
            pieces.append(Piece(name, rows))
            at += rows
        return tuple(pieces) if not shape or at == shape[0] else None


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Of stacked experts (E, out, in) as the hub has them."""
    return (shape[0], shape[2], shape[1]) if len(shape) == 3 else ()


def _square(shape: tuple[int, ...]) -> bool:
    return len(shape) == 3 and shape[1] == shape[2]


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
