"""The routers of a mixture of experts, made to choose what the engine chose (`objectives.routing` has the formula)."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.objectives.routing import replaying

_ROUTERS = frozenset(
    {
        "MixtralTopKRouter",
        "OlmoeTopKRouter",
        "Qwen2MoeTopKRouter",
        "Qwen3MoeTopKRouter",
        "Qwen3NextTopKRouter",
        "Qwen3OmniMoeThinkerTextTopKRouter",
        "Qwen3VLMoeTextTopKRouter",
        "Qwen3_5MoeTopKRouter",
    }
)
"""Of transformers 5.18: softmax over all experts, then the best k; forward returns (logits, gates, experts)."""
_FAMILIES = (
    "mixtral",
    "olmoe",
    "qwen2_moe",
    "qwen3_moe",
    "qwen3_next",
    "qwen3_omni_moe",
    "qwen3_vl_moe",
    "qwen3_5_moe",
)


def check_replayable(model: Path) -> None:
    """Raises OmnifleetError(UNSUPPORTED) if the checkpoint folder is of no family whose routers can be made to choose."""
    family = str(json.loads((model / "config.json").read_text()).get("model_type", ""))
    if family not in _FAMILIES:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"the routing of model type {family!r} cannot be replayed; known are {', '.join(_FAMILIES)}",
            knob="rollout.engine.return_routed_experts",
        )


class Routers:
    """The routers of one model, first layer first: the order in which engines report their choice."""

    def __init__(self, model: nn.Module) -> None:
        self._routers = {
            name: module for name, module in model.named_modules() if type(module).__name__ in _ROUTERS
        }

    @contextmanager
    def replaying(self, micro: MicroBatch) -> Iterator[None]:
        """Inside, the routers choose what the engine chose for `micro`; their own where it did not say.

        Raises OmnifleetError(INVALID_REQUEST) if the engine's model has another number of mixture layers.
        """
        if micro.experts is None:
            yield
            return
        layers, chosen = micro.experts.shape[2:]
        if layers != len(self._routers):
            raise invalid(
                f"the engine routed through {layers} mixture layers, the trainer's model has {len(self._routers)}",
                knob="model.path and library versions must agree on both sides",
            )
        choices = {
            name: micro.experts[:, :, layer].reshape(-1, chosen) for layer, name in enumerate(self._routers)
        }
        with replaying(self._routers, choices):
            yield
