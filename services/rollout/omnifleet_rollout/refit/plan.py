"""Where each slice of each source tensor lands in parameter memory, learnt from the model's own loader.

The loader runs once on sources without bytes (meta tensors) under a dispatch mode that sees every copy into parameter
memory and notes it instead of doing it: nothing moves, nothing changes, it takes milliseconds. What the loader does
with views (tensor-parallel slices, fused QKV and gate-up, expert stacking, transposes) and with one whole cast or clone
on the way is understood. Arithmetic on a source, or a value that is looked at, is not: then there is no plan.

Whether the engine changes weights after loading (packs, quantises, absorbs) a recording can't see. So a plan is believed
only after `proving`: it is compared with what the loader makes of the same sources.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from omnifleet.address import canonical_json, digest_bytes
from omnifleet_refit.windows import View

Loader = Callable[[Iterable[tuple[str, torch.Tensor]]], Any]
_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Move:
    """Copy `source`'s window into a window of parameter `target`, casting and broadcasting as copy_ does."""

    source: str
    read: View
    target: str
    write: View


@dataclass(frozen=True, slots=True)
class Fill:
    """A window of parameter `target` that holds one value for ever."""

    target: str
    write: View
    value: float


@dataclass(frozen=True, slots=True)
class Plan:
    """All moves of one model. key: see `plan_key`.

    fills: padding, which the loader writes and no source reaches. untouched: parameters that the loader does not write.
    unread: sources that it does not read.
    """

    key: str
    moves: tuple[Move, ...]
    fills: tuple[Fill, ...]
    shapes: Mapping[str, tuple[int, ...]]
    untouched: tuple[str, ...]
    unread: tuple[str, ...]

    def bind(
        self, model: torch.nn.Module, sources: Mapping[str, torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(destination, source) pairs for the tensors given, contiguous ones. Raises LookupError for one of another shape."""
        targets = dict(parameter_memory(model))
        pairs = []
        for name, tensor in sources.items():
            if self.shapes.get(name) != tuple(tensor.shape):
                raise LookupError(f"{name} {tuple(tensor.shape)} is not in the plan")
        for move in self.moves:
            source = sources.get(move.source)
            if source is not None:
                into = move.write.on(targets[move.target])
                pairs.append((into, move.read.on(source, int(source.storage_offset())).expand(into.shape)))
        return _largest_first(pairs)

    def bind_pieces(
        self, model: torch.nn.Module, pieces: Mapping[tuple[str, View], torch.Tensor]
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Like `bind`, of windows of sources: (name, window) -> its elements, in the window's shape."""
        targets, pairs = dict(parameter_memory(model)), []
        for move in self.moves:
            piece = pieces.get((move.source, move.read))
            if piece is not None:
                into = move.write.on(targets[move.target])
                pairs.append((into, piece.expand(into.shape)))
        return _largest_first(pairs)

    def needs(self) -> dict[str, tuple[View, ...]]:
        """The windows of each source that this rank reads, each once: all that it would have to be sent."""
        windows: dict[str, dict[View, None]] = {}
        for move in self.moves:
            windows.setdefault(move.source, {})[move.read] = None
        return {name: tuple(views) for name, views in windows.items()}

    @property
    def share(self) -> float:
        """Elements that this rank reads over those of all sources, 0..1: a half and a little more for one rank of two."""
        read = sum(view.elements for views in self.needs().values() for view in views)
        return min(1.0, read / max(1, sum(prod(shape) for shape in self.shapes.values())))

    def check_fits(self, model: torch.nn.Module) -> None:
        """Raises LookupError if a move or fill would leave a source, or the model's memory."""
        targets = dict(parameter_memory(model))
        writes = [(move.target, move.write) for move in self.moves]
        writes += [(fill.target, fill.write) for fill in self.fills]
        for target, write in writes:
            if target not in targets:
                raise LookupError(f"the model has no {target}")
            room = targets[target].untyped_storage().nbytes() // targets[target].element_size()
            if not write.lies_within(room):
                raise LookupError(f"a copy leaves {target}")
        for move in self.moves:
            if move.source not in self.shapes or not move.read.lies_within(prod(self.shapes[move.source])):
                raise LookupError(f"a copy leaves {move.source}")


class NotPlannable(Exception):
    """The loader does more with a source than to place it; says what."""


def plan_key(
    model: torch.nn.Module, table: Mapping[str, tuple[torch.dtype, Sequence[int]]], build: str
) -> str:
    """Digest of all that a plan depends on: engine build and rank (`build`), model class, source table, memory layout."""
    memory = [
        [name, str(tensor.dtype), list(tensor.shape), list(tensor.stride()), tensor.storage_offset()]
        for name, tensor in parameter_memory(model)
    ]
    sources = sorted([name, str(dtype), list(shape)] for name, (dtype, shape) in table.items())
    parts = [build, type(model).__name__, sources, memory, "largest first"]
    return digest_bytes(canonical_json(parts), "refit-plan")


def record(
    model: torch.nn.Module, load: Loader, table: Mapping[str, tuple[torch.dtype, Sequence[int]]], build: str
) -> Plan:
    """Learn a plan from `load`, the model's own loader. table: name -> dtype, shape of each source tensor.

    build: names the engine and the rank, for the key. The model is not changed. Raises NotPlannable.
    """
    sources = {
        name: torch.empty(tuple(shape), dtype=dtype, device="meta") for name, (dtype, shape) in table.items()
    }
    recorder = _Recorder(sources, dict(parameter_memory(model)))
    try:
        with torch.no_grad(), recorder:
            load(iter(sources.items()))
    except (
        Exception
    ) as error:  # a loader of vLLM's, given tensors without bytes: it fails in a way of its own
        raise NotPlannable(
            f"the loader fails on weights without values: {type(error).__name__}: {error}"
        ) from error
    recorder.check()
    return Plan(
        key=plan_key(model, table, build),
        moves=tuple(recorder.moves),
        fills=tuple(recorder.fills),
        shapes={name: tuple(tensor.shape) for name, tensor in sources.items()},
        untouched=tuple(n for n, _ in model.named_parameters() if n not in recorder.reached),
        unread=tuple(sorted(sources.keys() - {move.source for move in recorder.moves})),
    )


@dataclass(frozen=True, slots=True)
class _Origin:
    """A tensor that is a window of a source, or a cast or clone of one. fresh: the cast's own window."""

    source: str
    read: View
    fresh: View | None = None


@dataclass
class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes copies into the targets; everything else runs as ever."""

    sources: Mapping[str, torch.Tensor]
    targets: Mapping[str, torch.Tensor]
    moves: list[Move] = field(default_factory=list)
    fills: list[Fill] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)
    strange: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._source_of = {storage_id(t): name for name, t in self.sources.items()}
        self._target_of = {storage_id(t): name for name, t in self.targets.items()}
        self._derived: dict[int, _Origin] = {}
        self._kept: list[torch.Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is _aten.copy_.default and self._target(args[0]):
            self._note(args[0], args[1])
            return args[0]
        if func in _WRITES and self._target(args[0]):
            self._fill(args[0], float(args[1]) if len(args) > 1 else 0.0)
            return args[0]
        out = func(*args, **kwargs)
        if func in _COPIES and isinstance(args[0], torch.Tensor):
            self._derive(args[0], out)
        return out

    def check(self) -> None:
        """Raises NotPlannable if anything was copied that is not a window of a source."""
        if self.strange:
            raise NotPlannable(f"{len(self.strange)} copies are of computed values, first: {self.strange[0]}")

    def _note(self, into: torch.Tensor, value: Any) -> None:
        target = self._target(into)
        self.reached.add(target)
        origin = self._origin(value)
        if origin is None:
            self.strange.append(f"{target}{tuple(into.shape)}")
        else:
            self.moves.append(Move(origin.source, origin.read, target, View.of(into)))

    def _fill(self, into: torch.Tensor, value: float) -> None:
        if into.numel():
            self.reached.add(self._target(into))
            self.fills.append(Fill(self._target(into), View.of(into), value))

    def _origin(self, value: Any) -> _Origin | None:
        if not isinstance(value, torch.Tensor):
            return None
        name = self._source_of.get(storage_id(value))
        if name is not None:
            return _Origin(name, View.of(value))
        derived = self._derived.get(storage_id(value))
        return derived if derived is not None and derived.fresh == View.of(value) else None

    def _derive(self, value: torch.Tensor, out: Any) -> None:
        origin = self._origin(value)
        if origin is not None and isinstance(out, torch.Tensor) and storage_id(out) != storage_id(value):
            self._kept.append(out)  # so that its storage's identity is not given to another
            self._derived[storage_id(out)] = _Origin(origin.source, origin.read, View.of(out))

    def _target(self, tensor: Any) -> str:
        return self._target_of.get(storage_id(tensor), "") if isinstance(tensor, torch.Tensor) else ""


_COPIES = {_aten.clone.default, _aten._to_copy.default}
_WRITES = {_aten.fill_.Scalar, _aten.fill_.Tensor, _aten.zero_.default}


def replay(pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Do the moves; on a device they are only queued.

    One by one: where both sides are contiguous that is the device's own copy, faster than one kernel over all of them.
    """
    for into, value in pairs:
        into.copy_(value, non_blocking=True)


def _largest_first(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """A device that has the large copies to do is not kept waiting while the many small ones are queued.

    Equal windows keep their order; a plan whose order matters otherwise is found out by `agrees`, which replays this one.
    """
    return sorted(pairs, key=lambda pair: -pair[0].nbytes)


def parameter_memory(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Parameters and buffers, each storage under its first name; not those that are small windows of another's."""
    seen: set[int] = set()
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if tensor.numel() and storage_id(tensor) not in seen:
            seen.add(storage_id(tensor))
            yield name, tensor.detach()


def storage_id(tensor: torch.Tensor) -> int:
    """Names the memory that a tensor is a window of, while it lives."""
    return int(tensor.untyped_storage()._cdata)
