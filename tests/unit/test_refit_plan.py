"""The recorded plan: what a loader does to parameter memory, learnt without moving a byte, and believed only if checked."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import pytest
import torch
from torch import nn

from omnifleet_rollout.refit.plan import NotPlannable, Plan, record, replay
from omnifleet_rollout.refit.proving import agrees

HIDDEN, EXPERTS, WORLD = 8, 3, 2
Weights = dict[str, torch.Tensor]


class Sharded(nn.Module):
    """Loads as engines do: rank `rank` of two, QKV and gate-up fused, experts stacked, one matrix transposed, padding."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN))
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN // WORLD, HIDDEN))
        self.gate_up = nn.Parameter(torch.zeros(2 * 16 // WORLD, HIDDEN, dtype=torch.bfloat16))
        self.down = nn.Parameter(torch.zeros(HIDDEN, 16 // WORLD))
        self.experts = nn.Parameter(torch.zeros(EXPERTS, HIDDEN, HIDDEN))
        self.turned = nn.Parameter(torch.zeros(5, HIDDEN))
        self.head = self.embed
        self.register_buffer("scale", torch.ones(4))

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        for name, w in weights:
            self.place(name, w)

    def place(self, name: str, w: torch.Tensor) -> None:
        half = HIDDEN // WORLD
        if name in ("q", "k", "v"):
            row = "qkv".index(name) * half
            self.qkv.data.narrow(0, row, half).copy_(w.narrow(0, self.rank * half, half))
        elif name in ("gate", "up"):
            row = ("gate", "up").index(name) * 8
            self.gate_up.data[row : row + 8] = w.chunk(WORLD)[self.rank].to(torch.bfloat16)
        elif name == "down":
            self.down.data.copy_(w[:, self.rank * 8 : (self.rank + 1) * 8].contiguous())
        elif name.startswith("expert."):
            self.experts.data[int(name[7:])].copy_(w.t())
        elif name == "turned":
            self.turned.data.copy_(w.t())
        elif name == "scale":
            self.scale.copy_(w.expand(4))
        elif name == "embed":
            self.embed[: w.shape[0]].data.copy_(w)
            self.embed[w.shape[0] :].data.fill_(0)


def sources(seed: int) -> Weights:
    g = torch.Generator().manual_seed(seed)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g)

    return {
        **{name: of(HIDDEN, HIDDEN) for name in ("q", "k", "v")},
        **{name: of(16, HIDDEN) for name in ("gate", "up")},
        **{f"expert.{i}": of(HIDDEN, HIDDEN) for i in range(EXPERTS)},
        "down": of(HIDDEN, 16),
        "turned": of(HIDDEN, 5),
        "scale": of(1),
        "embed": of(13, HIDDEN),
        "rotary.inv_freq": of(4),
    }


def table(weights: Weights) -> dict[str, tuple[torch.dtype, list[int]]]:
    return {name: (w.dtype, list(w.shape)) for name, w in weights.items()}


def planned(model: nn.Module) -> Plan:
    return record(model, model.load_weights, table(sources(0)), "build 1")  # type: ignore[arg-type,operator]


def state(model: nn.Module) -> Weights:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


@pytest.mark.parametrize("rank", range(WORLD))
def test_a_plan_does_what_the_loader_does_bit_for_bit(rank: int) -> None:
    model, reference = Sharded(rank), Sharded(rank)
    before = state(model)
    plan = planned(model)
    assert all(torch.equal(before[name], now) for name, now in state(model).items()), (
        "recording moves nothing"
    )
    assert plan.unread == ("rotary.inv_freq",) and plan.untouched == ()
    new = sources(1)
    replay(plan.bind(model, new))
    with torch.no_grad():
        reference.load_weights(new.items())
    for name, expected in state(reference).items():
        assert torch.equal(state(model)[name], expected), name


def test_part_of_a_fused_layer_changes_alone() -> None:
    model = Sharded(0)
    plan = planned(model)
    replay(plan.bind(model, sources(1)))
    before = state(model)
    replay(plan.bind(model, {"k": sources(2)["k"]}))
    half = HIDDEN // WORLD
    assert torch.equal(model.qkv[half : 2 * half], sources(2)["k"][:half])
    assert torch.equal(model.qkv[:half], before["qkv"][:half])
    assert torch.equal(model.gate_up, before["gate_up"])


def test_a_plan_is_checked_against_the_loader_and_leaves_its_result() -> None:
    model, new = Sharded(1), sources(3)
    plan = planned(model)

    def load() -> None:
        model.load_weights(new.items())

    assert agrees(model, plan, new, load) == []

    def packing() -> None:
        load()
        model.turned.data.mul_(2)  # what an engine does after loading, unseen by the recording

    assert agrees(model, plan, new, packing) == [".turned"]
    assert torch.equal(model.turned, 2 * new["turned"].t())

    class Absorbing(Sharded):
        absorbed = torch.zeros(1)

    other = Absorbing(1)

    def absorbing() -> None:
        other.load_weights(new.items())
        other.absorbed = other.qkv.detach() @ other.embed.detach().t()

    assert agrees(other, planned(other), new, absorbing) == [".absorbed"]


def test_a_plan_that_misses_a_copy_is_found_out_even_if_the_weights_were_there() -> None:
    model, new = Sharded(0), sources(4)
    plan = planned(model)
    replay(plan.bind(model, new))
    lame = replace(plan, moves=tuple(move for move in plan.moves if move.source != "q"))
    with torch.no_grad():
        assert agrees(model, lame, new, lambda: model.load_weights(new.items())) == [".qkv"]


def test_computed_values_and_looks_at_values_make_no_plan() -> None:
    class Computing(Sharded):
        def place(self, name: str, w: torch.Tensor) -> None:
            super().place(name, -w.exp() if name == "turned" else w)

    class Looking(Sharded):
        def place(self, name: str, w: torch.Tensor) -> None:
            if name == "scale" and w.sum().item() > 0:
                super().place(name, w)

    class Lost(Sharded):
        def place(self, name: str, w: torch.Tensor) -> None:
            super().place(name, w.quantised)  # type: ignore[attr-defined]

    with pytest.raises(NotPlannable, match="computed values, first: turned"):
        planned(Computing(0))
    with pytest.raises(NotPlannable, match="without values: RuntimeError"):
        planned(Looking(0))
    with pytest.raises(NotPlannable, match="without values: AttributeError"):
        planned(Lost(0))


def test_a_plan_takes_no_tensor_of_another_shape_and_its_key_names_build_model_and_table() -> None:
    model = Sharded(0)
    plan = planned(model)
    with pytest.raises(LookupError, match="gate"):
        plan.bind(model, {"gate": torch.zeros(4, HIDDEN)})
    other = record(model, model.load_weights, table(sources(0)), "build 2")
    assert plan.key == planned(Sharded(1)).key != other.key


def test_a_source_of_another_float_dtype_is_cast_as_copy_does() -> None:
    model = Sharded(0)
    replay(planned(model).bind(model, {"up": sources(1)["up"].double()}))
    assert torch.equal(model.gate_up[8:16], sources(1)["up"][:8].bfloat16())


def test_large_copies_come_first_and_equal_windows_keep_their_order() -> None:
    model, large, small = nn.Module(), nn.Parameter(torch.zeros(64)), nn.Parameter(torch.zeros(4))
    model.large, model.small = large, small

    def load(weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        targets = {"a": small, "b": small, "c": large}
        for name, tensor in weights:
            targets[name].data.copy_(tensor)

    shapes = {"a": (4,), "b": (4,), "c": (64,)}
    plan = record(model, load, {name: (torch.float32, shape) for name, shape in shapes.items()}, "build")
    sources = {name: torch.full(shape, float(ord(name))) for name, shape in shapes.items()}
    pairs = plan.bind(model, sources)
    assert [int(value[0]) for _, value in pairs] == [ord(name) for name in "cab"]
    with torch.no_grad():
        replay(pairs)
    assert small[0] == ord("b")
