"""Where a model has a checkpoint's tensors: cut, stacked, renamed; and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers.core_model_loading import (
    Chunk,
    MergeModulelist,
    Transpose,
    WeightConverter,
    WeightRenaming,
)

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.held import Held, held_by

STATE = {
    "model.embed.weight": (6, 4),
    "model.q.weight": (4, 4),
    "model.k.weight": (2, 4),
    "model.v.weight": (2, 4),
    "model.experts.up": (3, 4, 4),
    "model.scale": (4,),
    "model.count": (),
}
SHAPES = {
    "old.embed.weight": (6, 4),
    "old.qkv.weight": (8, 4),
    **{f"old.experts.{i}.up.weight": (4, 4) for i in range(3)},
    "old.scale": (4,),
    "old.count": (),
}


STACKED = {"layers.0.experts.up": (3, 8, 4), "layers.0.experts.down": (3, 4, 5), "head": (2, 4)}
HUB = STACKED | {"layers.0.experts.up": (3, 4, 8), "layers.0.experts.down": (3, 5, 4)}


def model_of(*conversions: Any) -> Any:
    """What `revert_weight_conversion` reads of a loaded model."""
    return SimpleNamespace(
        state_dict=lambda: {name: torch.zeros(shape) for name, shape in STATE.items()},
        _weight_conversions=[WeightRenaming("^old.", "model."), *conversions],
        config=None,
    )


QKV = WeightConverter("qkv", ["q", "k", "v"], [Chunk(dim=0)])
EXPERTS = WeightConverter("experts.*.up.weight", "experts.up", [MergeModulelist(dim=0)])


def values() -> dict[str, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    return {name: torch.randn(shape, generator=random) for name, shape in STATE.items()}


@pytest.fixture
def held() -> Held:
    return held_by(model_of(QKV, EXPERTS), SHAPES)


def test_what_is_collected_has_the_checkpoint_s_names_and_is_rebuilt(held: Held) -> None:
    own = values()
    stored = dict(held.collected(own, own.__getitem__))
    assert {name: tuple(tensor.shape) for name, tensor in stored.items()} == SHAPES
    assert torch.equal(stored["old.qkv.weight"][4:6], own["model.k.weight"])
    assert torch.equal(stored["old.experts.2.up.weight"], own["model.experts.up"][2])
    for name, tensor in own.items():
        assert torch.equal(held.rebuilt(name, stored.__getitem__), tensor), name


def test_a_stack_is_asked_for_once(held: Held) -> None:
    """It may take all ranks to make it whole."""
    own, asked = values(), []

    def tensor(name: str) -> torch.Tensor:
        asked.append(name)
        return own[name]

    list(held.collected(own, tensor))
    assert sorted(asked) == sorted(STATE)


def test_a_part_of_what_lies_in_one_tensor_is_not_collected(held: Held) -> None:
    own = values()
    assert not dict(held.collected(["model.q.weight", "model.k.weight"], own.__getitem__))


def test_freezing_takes_all_of_a_stack_or_none(held: Held) -> None:
    experts = {name for name in SHAPES if "experts" in name}
    assert held.frozen(STATE, experts | {"old.qkv.weight"}) == {
        "model.experts.up",
        "model.q.weight",
        "model.k.weight",
        "model.v.weight",
    }
    with pytest.raises(OmnifleetError, match="name all or none") as caught:
        held.frozen(STATE, {"old.experts.1.up.weight"})
    assert caught.value.reason is Reason.INVALID_CONFIG and caught.value.knob == "model.freeze"


def test_a_turned_tensor_is_refused_although_its_shape_fits() -> None:
    """Experts of some layouts lie transposed; of equal sides no shape tells."""
    turned = WeightConverter(
        "experts.*.up.weight", "experts.up", [MergeModulelist(dim=0), Transpose(dim0=1, dim1=2)]
    )
    with pytest.raises(OmnifleetError, match=r"different tensors.*experts") as caught:
        held_by(model_of(QKV, turned), SHAPES)
    assert caught.value.reason is Reason.UNSUPPORTED


def stacked(shapes: dict[str, tuple[int, ...]]) -> Any:
    """A model whose loader turns experts where shapes do not agree, as transformers' of Qwen3-VL does."""
    return SimpleNamespace(
        state_dict=lambda: {name: torch.zeros(shape) for name, shape in shapes.items()},
        get_parameter=lambda name: torch.zeros(shapes[name]),
        _weight_conversions=[
            WeightConverter(name, name, [Transpose(1, 2, check_dims=True)])
            for name in ("experts.up", "experts.down")
        ],
        config=None,
    )


def test_experts_that_lie_as_on_the_hub_are_turned_and_turned_back() -> None:
    held = held_by(stacked(STACKED), HUB)
    own = {name: torch.randn(shape) for name, shape in STACKED.items()}
    sent = dict(held.collected(own, own.__getitem__))
    assert {name: tuple(tensor.shape) for name, tensor in sent.items()} == HUB
    assert torch.equal(sent["layers.0.experts.up"], own["layers.0.experts.up"].mT)
    assert all(tensor.is_contiguous() for tensor in sent.values())
    assert all(torch.equal(held.rebuilt(name, sent.__getitem__), tensor) for name, tensor in own.items())


def test_experts_of_equal_sides_beside_turned_ones_are_refused() -> None:
    square = {"layers.0.experts.up": (3, 4, 4)}
    with pytest.raises(OmnifleetError, match=r"different tensors.*experts\.up"):
        held_by(stacked(STACKED | square), HUB | square)


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"old.more": (3,)}, "old.more"),
        ({"old.scale": None}, "model.scale"),
        ({"old.scale": (5,)}, "old.scale"),
        ({"old.qkv.weight": (9, 4)}, "old.qkv.weight"),
        ({"old.experts.1.up.weight": None}, "model.experts.up"),
    ],
)
def test_sides_that_hold_different_tensors_are_refused(changes: dict[str, Any], named: str) -> None:
    shapes = {name: shape for name, shape in (SHAPES | changes).items() if shape is not None}
    with pytest.raises(OmnifleetError, match=named):
        held_by(model_of(QKV, EXPERTS), shapes)


def test_what_a_family_names_may_be_on_one_side_alone() -> None:
    shapes = {name: shape for name, shape in SHAPES.items() if name != "old.scale"} | {"old.mean": (3,)}
    held = held_by(model_of(QKV, EXPERTS), shapes, fixed=("*.scale",), passive=("*.mean",))
    assert "model.scale" not in held and held.all_sources(held.names) == set(shapes) - {"old.mean"}
