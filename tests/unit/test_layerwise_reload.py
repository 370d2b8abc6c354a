"""The loader path's reload on toy models with vLLM's own reload functions: no layer keeps its old weights unnoticed."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine.extension import OmnifleetExtension
from omnifleet_rollout.refit.weights import Sources

pytestmark = pytest.mark.heavy
WIDE = 4
Kind = TypeVar("Kind", bound=nn.Module)


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


class Fused(nn.Module):
    """One matrix of three parts, and another layer before it and behind it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)
        self.qkv = nn.Linear(WIDE, 3 * WIDE)
        parts: list[Any] = list(self.qkv.parameters())
        for part in parts:
            part.weight_loader = _place

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        from vllm.model_executor.model_loader.weight_utils import default_weight_loader

        for name, weight in weights:
            layer, _, kind = name.partition(".")
            own = self.get_submodule("qkv" if layer in "qkv" else layer)
            parameter = own.get_parameter(kind)
            load = getattr(parameter, "weight_loader", default_weight_loader)
            (partial(load, part=layer) if layer in "qkv" else load)(parameter, weight)


def _place(param: torch.Tensor, weight: torch.Tensor, part: str) -> None:
    param.data.narrow(0, "qkv".index(part) * WIDE, WIDE).copy_(weight)


def sources(model: Model, value: float) -> Sources:
    """Every parameter under its name in the checkpoint."""
    final = "vision_final_layernorm."
    return {
        f"vision_projector.{name}" if name.startswith(final) else name: torch.full_like(p, value)
        for name, p in model.named_parameters()
    }


def reload(model: nn.Module, weights: Sources, *, breaks_after: int = 0) -> None:
    """What a commit on the loader path does. breaks_after: so many tensors, if any."""

    def everything() -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(weights.items(), 1):
            yield item
            if number == breaks_after:
                raise OSError("broke half-way")

    extension: Any = OmnifleetExtension()
    extension._omni = SimpleNamespace(table=weights, everything=everything)
    extension.model_config = SimpleNamespace(hf_text_config=SimpleNamespace(), dtype=torch.float32)
    with torch.no_grad():
        extension._omni_reload(model)


def made(kind: type[Kind]) -> Kind:
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


def test_scales_of_attention_are_for_no_loader_to_reach() -> None:
    from vllm.model_executor.layers.attention import Attention

    class Scales(Attention):  # type: ignore[misc]
        """As it is where an engine is quantised, and without all else."""

        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.k_scale = nn.Parameter(torch.tensor(-1.0))

        def process_weights_after_loading(self, act_dtype: torch.dtype) -> None: ...

    class Quantised(Model):
        def __init__(self) -> None:
            super().__init__()
            self.tower, self.mlp1 = nn.ModuleList(), nn.Sequential()
            self.vision_final_layernorm = nn.Identity()  # type: ignore[assignment]
            self.attention = Scales()

    model = made(Quantised)
    reload(model, {name: p for name, p in sources(model, 3.0).items() if name != "attention.k_scale"})
    assert torch.equal(model.language.weight, torch.full((WIDE, WIDE), 3.0))
    assert float(model.attention.k_scale) == -1


@pytest.mark.parametrize("breaks_after", range(1, 10))
def test_what_a_load_brought_that_broke_half_way_does_not_count_towards_the_next(breaks_after: int) -> None:
    model = made(Fused)
    shapes = {f"{layer}.{kind}": shape for layer in ("first", "k", "q", "v", "last")
              for kind, shape in (("bias", (WIDE,)), ("weight", (WIDE, WIDE)))}  # fmt: skip
    with pytest.raises(OSError, match="half-way"):
        reload(model, {n: torch.full(s, 3.0) for n, s in shapes.items()}, breaks_after=breaks_after)
    assert not any(parameter.is_meta for parameter in model.parameters()), (
        "a step of the engine would kill it"
    )
    reload(model, {n: torch.full(s, 5.0) for n, s in shapes.items()})
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 5.0)), name
