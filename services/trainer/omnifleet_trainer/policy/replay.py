"""The routers of a mixture of experts, made to choose what the engine chose (`objectives.routing` has the formula)."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.objectives.routing import replaying

_ROUTERS = frozenset(
    {
        "MixtralTopKRouter",
        "NemotronHTopkRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
        "Qwen3OmniMoeThinkerTextTopKRouter",
        "Qwen3VLMoeTextTopKRouter",
        "Qwen3_5MoeTopKRouter",
    }
)
"""Of transformers 5.18; forward returns (logits, gates, experts)."""
_FAMILIES = (
    "mixtral",
    "nemotron_h_omni",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "qwen3_5_moe",
)
_OF_BACKEND = {"automodel": _FAMILIES, "megatron": ("nemotron_h_omni", "qwen3_vl_moe")}


def check_replayable(model: Path, backend: str = "automodel") -> None:
    """Raises OmnifleetError(UNSUPPORTED) if the checkpoint folder is of no family whose routers `backend` makes choose."""
    family = str(json.loads((model / "config.json").read_text()).get("model_type", ""))
    known = _OF_BACKEND.get(backend)
    if known is not None and family not in known:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the routing of model type {family!r} cannot be replayed by {backend}; known are {', '.join(known)}",
            knob="rollout.engine.return_routed_experts",
        )


@dataclass(frozen=True, slots=True)
class Mixture:
    """Which of a decoder's `layers` route, on whatever rank: their numbers, from 0. A token goes to `chosen` of `experts`."""

    numbers: tuple[int, ...]
    layers: int
    experts: int
    chosen: int

    def check(self, micros: Sequence[MicroBatch]) -> None:
        """Raises OmnifleetError(INVALID_REQUEST) if what the engine chose is of another model than this one."""
        for experts in (micro.experts for micro in micros if micro.experts is not None):
            self.rows(experts.shape[2])
            if experts.shape[3] != self.chosen or int(experts.max()) >= self.experts:
                raise _other(
                    f"the engine routed a token to {experts.shape[3]} experts, up to number {int(experts.max())}; the "
                    f"trainer's model to {self.chosen} of {self.experts}"
                )

    def rows(self, told: int) -> dict[int, int]:
        """Number of a layer that routes -> its place among the `told` layers that the engine speaks of.

        Engines tell of the layers that route, or of all (vLLM, whose rows of others are empty). Raises INVALID_REQUEST.
        """
        if told == len(self.numbers):
            return {number: at for at, number in enumerate(self.numbers)}
        if told == self.layers and self.numbers:
            return {number: number for number in self.numbers}
        raise _other(
            f"the engine routed through {told} mixture layers, the trainer's model has {len(self.numbers)}"
        )


def _other(message: str) -> OmnifleetError:
    return invalid(message, knob="model.path and library versions must agree on both sides")


class Routers:
    """The routers of one model of transformers, first layer first."""

    def __init__(self, model: nn.Module, config: Any) -> None:
        """config: of transformers, of the whole model or of its language part."""
        self._routers = {
            _layer_of(name): module
            for name, module in model.named_modules()
            if type(module).__name__ in _ROUTERS
        }
        some: Any = next(iter(self._routers.values()), None)
        self.mixture = Mixture(
            numbers=tuple(self._routers),
            layers=config.get_text_config().num_hidden_layers,
            experts=0 if some is None else some.num_experts,
            chosen=0 if some is None else some.top_k,
        )
        self._current: Tensor | None = None

    def replaying(self, micro: MicroBatch) -> AbstractContextManager[None]:
        """Inside, the routers choose what the engine chose for `micro`; their own where it did not say."""
        return self._choosing(micro.experts)

    def again(self) -> AbstractContextManager[None]:
        """For a layer that is computed again in the backward pass: the choice of now, whatever it is by then."""
        return self._choosing(self._current)

    @contextmanager
    def _choosing(self, experts: Tensor | None) -> Iterator[None]:
        if experts is None:
            yield
            return
        rows = self.mixture.rows(experts.shape[2])
        choices = {str(n): experts[:, :, rows[n]].flatten(0, 1) for n in self._routers}
        before, self._current = self._current, experts
        try:
            with replaying({str(n): router for n, router in self._routers.items()}, choices):
                yield
        finally:
            self._current = before


def _layer_of(name: str) -> int:
    """The number of the layer that a router's name is of."""
    found = re.findall(r"\blayers\.(\d+)\.", name)
    if len(found) != 1:
        raise ValueError(f"router {name} is of no layer of a list")
    return int(found[0])
