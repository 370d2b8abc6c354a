"""Is a plan right? What it makes is compared with what the engine's own loader makes of the same sources.

With a shadow, by doing both (`agrees`). Without one sources pass by once, on their way to the loader, and the windows that
the plan would copy are compared with where it would put them (`Windows`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping

import torch

from omnifleet.wire.fold import ROW_BYTES
from omnifleet_refit.fold import as_hex, fold
from omnifleet_rollout.refit.plan import Move, Plan, parameter_memory, replay, storage_id


def agrees(
    model: torch.nn.Module, plan: Plan, sources: Mapping[str, torch.Tensor], load: Callable[[], None]
) -> list[str]:
    """Wipe every tensor that the plan writes to, replay it, then `load` (the engine's path) the same sources and compare.

    Returns the names of tensors that differ, bit for bit; in any case the model holds what the loader made. Compared is
    all that hangs on the model: parameters, buffers, and tensors that modules keep as plain attributes.
    """
    pairs, targets = plan.bind(model, sources), dict(parameter_memory(model))
    with torch.no_grad():
        for name in {move.target for move in plan.moves}:
            targets[name].fill_(float("nan") if targets[name].is_floating_point() else 1)
        for fill in plan.fills:
            fill.write.on(targets[fill.target]).fill_(fill.value)
        replay(pairs)
        ours = state_digests(model)
        load()
        theirs = state_digests(model)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


class Windows:
    """Of one load, of a model as it is before; `see` every source, load, then ask what is `different`."""

    def __init__(self, plan: Plan, model: torch.nn.Module) -> None:
        self._model, self._moves = model, dict[str, list[Move]]()
        for move in plan.moves:
            self._moves.setdefault(move.source, []).append(move)
        self._targets = {move.target for move in plan.moves} | {fill.target for fill in plan.fills}
        self._rest = state_digests(model, self._targets)
        self._dtypes = {name: tensor.dtype for name, tensor in parameter_memory(model)}
        self._expected: list[tuple[Move, str]] = []

    def see(self, name: str, tensor: torch.Tensor) -> None:
        """A source tensor, contiguous, on the model's device or the host."""
        for move in self._moves.pop(name, []):
            value = move.read.on(tensor, int(tensor.storage_offset())).expand(move.write.shape)
            self._expected.append((move, _digest(value.to(self._dtypes[move.target]))))

    def different(self) -> list[str]:
        """Names of what the plan would have made otherwise, or not at all."""
        memory = dict(parameter_memory(self._model))
        wrong = {m.target for m, digest in self._expected if _digest(m.write.on(memory[m.target])) != digest}
        rest = state_digests(self._model, self._targets)
        wrong |= {name for name in rest.keys() | self._rest.keys() if rest.get(name) != self._rest.get(name)}
        unseen = {move.target for moves in self._moves.values() for move in moves}
        return sorted(wrong | unseen)


def _everything(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, module in model.named_modules():
        held = {**module._parameters, **module._buffers, **vars(module)}
        for name, value in held.items():
            if isinstance(value, torch.Tensor) and name not in _CACHES:
                yield f"{prefix}.{name}", value.detach()


_CACHES = {"kv_cache"}


def state_digests(model: torch.nn.Module, besides: Collection[str] = ()) -> dict[str, str]:
    """All that hangs on a model, by name: dtype, shape and the device checksum of the elements.

    besides: names in `parameter_memory`; what lies in that memory is left out.
    """
    skipped = {storage_id(tensor) for name, tensor in parameter_memory(model) if name in besides}
    return {name: _digest(tensor) for name, tensor in _everything(model) if storage_id(tensor) not in skipped}


def _digest(tensor: torch.Tensor) -> str:
    says = f"{tensor.dtype} {tuple(tensor.shape)} "
    if not tensor.numel():
        return says
    raw = tensor.contiguous().reshape(-1).view(torch.uint8)
    return says + as_hex(fold(torch.nn.functional.pad(raw, (0, -raw.numel() % ROW_BYTES)), [0]))[0]
