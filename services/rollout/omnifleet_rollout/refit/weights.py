"""Source tensors of an engine: the shadow of a refit, and what of the committed version is kept on the host."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

import torch

from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.refit.shadow import no_room

Sources = dict[str, torch.Tensor]


class Weights:
    """By checkpoint name.

    The loader path loads a layer whole: a refit that changes one half of a fused layer needs the other half too. So what
    is committed by that path stays on the host (one model's worth); what was never sent is in the checkpoint. What was
    committed by plan lies in parameter memory alone: `by_plan` names it.
    """

    def __init__(self, model: Path) -> None:
        self.table = {spec.name: (spec.dtype, list(spec.shape)) for spec in read_table(model)}
        self._model = model
        self._committed: Sources = {}
        self._by_plan: set[str] = set()
        self.shadow: Sources = {}
        self.coming: Iterator[tuple[str, torch.Tensor]] | None = None
        """All of the next version as it arrives, once, where there is no shadow."""

    @property
    def complete(self) -> bool:
        """True if the shadow holds every tensor."""
        return self.shadow.keys() == self.table.keys()

    def check_loadable(self, coming: Collection[str]) -> None:
        """Raises NO_ROOM if the loader path lacks a tensor besides those that come: it is in parameter memory alone."""
        lost = self._by_plan.difference(coming)
        if lost:
            raise no_room(f"{len(lost)} tensors of the committed version are kept nowhere for the loader")

    def kept(self, name: str) -> torch.Tensor | None:
        """A tensor of the committed version, from the host or, if it was never sent, the checkpoint; None if neither has it."""
        if name in self._by_plan:
            return None
        if name in self._committed:
            return self._committed[name]
        return _read(self._places()[name], name)

    def everything(self) -> Iterator[tuple[str, torch.Tensor]]:
        """All tensors of the next version: in the checkpoint's order of names, or as they arrive."""
        if self.coming is not None:
            yield from self.coming
            return
        on_disk = self._files()
        for name in self.table:
            tensor = self.shadow.get(name, self._committed.get(name))
            yield name, tensor if tensor is not None else _read(on_disk[name], name)

    def commit(self, names: Collection[str], *, by_plan: bool) -> None:
        """What is in the shadow is loaded, and of the tensors named all that this rank reads."""
        if by_plan:
            self._by_plan.update(names)
            self._committed = {n: t for n, t in self._committed.items() if n not in names}
        else:
            self._by_plan -= self.shadow.keys()
            self._committed.update({name: _own(tensor) for name, tensor in self.shadow.items()})
        self.shadow = {}

    def _files(self) -> Mapping[str, Path]:
        missing = self.table.keys() - self.shadow.keys() - self._committed.keys()
        return self._places() if missing else {}

    def _places(self) -> Mapping[str, Path]:
        from safetensors import safe_open

        places = {}
        for file in sorted(self._model.glob("*.safetensors")):
            with safe_open(file, framework="pt") as source:
                places.update(dict.fromkeys(source.keys(), file))
        return places


def _own(tensor: torch.Tensor) -> torch.Tensor:
    """On the host, and not a window of a buffer that the next refit writes into."""
    if tensor.is_cuda:
        return tensor.cpu()
    return tensor if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.clone()


def _read(file: Path, name: str) -> torch.Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as source:
        tensor: torch.Tensor = source.get_tensor(name)
        return tensor
