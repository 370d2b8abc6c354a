"""The loader path's reload on toy models with vLLM's own reload functions: no layer keeps its old weights unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine.extension import OmnifleetExtension
from omnifleet_rollout.refit.weights import Sources

pytestmark = pytest.mark.heavy
WIDE = 4


class Scaled(nn.Module):
    """A layer of RADIO's tower: its scales are in no checkpoint."""

    def __init__(self) -> None:
        super().__init__()
        self.ls1, self.ls2 = nn.Parameter(torch.ones(WIDE)), nn.Parameter(torch.ones(WIDE))
        self.norm = nn.LayerNorm(WIDE)


class Model(nn.Module):
    """Loads by the parameters' loaders, but its projector by the default loader itself, as vLLM's Nemotron VL does."""

    ignored = ""

    def __init__(self) -> None:
        super().__init__()
        self.language = nn.Linear(WIDE, WIDE, bias=False)
        self.tower = nn.ModuleList([Scaled(), Scaled()])
        self.mlp1 = nn.Sequential(nn.LayerNorm(WIDE, bias=False), nn.Linear(WIDE, WIDE, bias=False))
        self.vision_final_layernorm = nn.LayerNorm(WIDE)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        parameters = dict(self.named_parameters())
        for name, weight in weights:
            if name == self.ignored or name.endswith((".ls1", ".ls2")):
                continue
            parameter = parameters[name.removeprefix("vision_projector.")]
            own = getattr(parameter, "weight_loader", default_weight_loader)
            direct = name.startswith(("mlp1.", "vision_projector."))
            (default_weight_loader if direct else own)(parameter, weight)


class NemotronH_Nano_VL_V2(Model):
    """Known, by this name, to bypass the reload."""


class Stranger(Model):
    """Not known to."""


def sources(model: Model, value: float) -> Sources:
    """Every parameter under its name in the checkpoint."""
    final = "vision_final_layernorm."
    return {
        f"vision_projector.{name}" if name.startswith(final) else name: torch.full_like(p, value)
        for name, p in model.named_parameters()
    }


def reload(model: Model, weights: Sources) -> None:
    """What a commit on the loader path does."""

    def everything() -> Iterator[tuple[str, torch.Tensor]]:
        yield from weights.items()

    extension: Any = OmnifleetExtension()
    extension._omni = SimpleNamespace(table=weights, everything=everything)
    extension.model_config = SimpleNamespace(hf_text_config=SimpleNamespace())
    with torch.no_grad():
        extension._omni_reload(model)


def made(kind: type[Model]) -> Model:
    from vllm.model_executor.model_loader.reload import record_metadata_for_reloading

    model = kind().requires_grad_(False)
    record_metadata_for_reloading(model)
    return model


def test_weights_that_bypass_the_reload_are_loaded_again_directly() -> None:
    model = made(NemotronH_Nano_VL_V2)
    places = {name: p.data_ptr() for name, p in model.named_parameters()}
    for value in (3.0, 5.0):
        reload(model, sources(model, value))
        for name, parameter in model.named_parameters():
            expected = 1.0 if name.endswith((".ls1", ".ls2")) else value
            assert torch.equal(parameter, torch.full_like(parameter, expected)), name
    assert {name: p.data_ptr() for name, p in model.named_parameters()} == places, (
        "captured graphs hold these"
    )


@pytest.mark.parametrize(
    ("kind", "ignored", "layer"),
    [(NemotronH_Nano_VL_V2, "language.weight", "language"), (Stranger, "", "mlp1.0, mlp1.1")],
    ids=["beside a bypass", "a bypass that is not known"],
)
def test_a_layer_that_no_weight_reached_is_named_and_not_left_old(
    kind: type[Model], ignored: str, layer: str
) -> None:
    model = made(kind)
    model.ignored = ignored
    with pytest.raises(OmnifleetError, match=f"did not reach .*{layer}") as caught:
        reload(model, sources(model, 3.0))
    assert caught.value.reason is Reason.ENGINE_ERROR
