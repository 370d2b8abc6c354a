"""Which mixtures ranks can share, and what a rank adds with the experts that it holds."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.expert_parallel import EXPERTS, check_expert_parallel, divide, experts_mesh
from omnifleet_trainer.policy.group import ALONE, start_group
from omnifleet_trainer.policy.shards import own

E, H, WIDTH = 4, 6, 5
TEXT: dict[str, Any] = {"num_local_experts": E}


@pytest.mark.parametrize(
    ("kind", "text", "words", "reason"),
    [
        ("qwen3_vl", {}, "no mixture", Reason.UNSUPPORTED),
        (
            "nemotron_h_omni",
            {"n_routed_experts": 8, "layers_block_type": ["mlp", "full_attention"]},
            "no mixture",
            Reason.UNSUPPORTED,
        ),
        ("glm4v_moe", {"n_routed_experts": E}, "not of glm4v_moe", Reason.UNSUPPORTED),
        ("qwen3_vl_moe", {"num_experts": 3}, "does not divide the model's 3", Reason.INVALID_CONFIG),
    ],
)
def test_models_whose_experts_cannot_be_shared_are_refused(
    kind: str, text: dict[str, Any], words: str, reason: Reason, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, "text_config": text}))
    with pytest.raises(OmnifleetError, match=words) as refused:
        check_expert_parallel(tmp_path, 2)
    assert refused.value.reason is reason and refused.value.knob == "trainer.parallel.ep"


@pytest.mark.parametrize(
    ("kind", "name", "text"),
    [
        ("qwen3_vl_moe", "text_config", TEXT),
        ("nemotron_h_omni", "text_config", {"n_routed_experts": 8, "layers_block_type": ["mamba", "moe"]}),
        ("nemotron_h_omni", "llm_config", {"n_routed_experts": 8, "hybrid_override_pattern": "ME*E"}),
    ],
)
def test_mixtures_that_are_known_are_taken(
    kind: str, name: str, text: dict[str, Any], tmp_path: Path
) -> None:
    """The last by the names of published configs."""
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind, name: text}))
    check_expert_parallel(tmp_path, 4)
    with pytest.raises(OmnifleetError, match="does not divide"):
        check_expert_parallel(tmp_path, 3)


class Experts(nn.Module):
    """As those of transformers: stacked weights, and a number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts = E
        self.up = nn.Parameter(torch.randn(E, WIDTH, H, dtype=torch.float64))
        self.down = nn.Parameter(torch.randn(E, H, WIDTH, dtype=torch.float64))

    def forward(self, hidden: Tensor, chosen: Tensor, gates: Tensor) -> Tensor:
        found = torch.zeros_like(hidden)
        for i in range(self.num_experts):
            rows, places = torch.where(chosen == i)
            inner = torch.tanh(hidden[rows] @ self.up[i].T) @ self.down[i].T
            found = found.index_add(0, rows, inner * gates[rows, places][:, None])
        return found


@pytest.fixture
def alone() -> Iterator[None]:
    """A world of one: all that a rank does, and what it gathers is its own."""
    start_group(ALONE)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("told", [[[0, 1], [3, 2], [1, 3]], [[0, 1]]])
def test_a_rank_with_every_expert_computes_the_module_and_its_gradients(
    told: list[list[int]], alone: None
) -> None:
    """Experts that no token goes to have a gradient of 0."""
    torch.manual_seed(0)
    whole, divided = Experts(), Experts()
    divided.load_state_dict(whole.state_dict())
    divide(divided, experts_mesh(1, 1)[EXPERTS], torch.float64)
    assert isinstance(divided.up, DTensor)
    chosen = torch.tensor(told)
    found = []
    for module in (whole, divided):
        hidden = torch.arange(len(told) * H, dtype=torch.float64).reshape(-1, H).div(7).requires_grad_()
        gates = torch.linspace(0.1, 0.9, chosen.numel(), dtype=torch.float64).reshape(chosen.shape)
        gates.requires_grad_()
        output = module(hidden, chosen, gates)
        output.square().sum().backward()
        found.append([output.detach(), *map(gradient, (hidden, gates, module.up, module.down))])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_a_rank_whose_experts_nobody_chose_adds_0_and_has_gradients(
    alone: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    experts = Experts()
    mesh = experts_mesh(1, 1)[EXPERTS]
    divide(experts, mesh, torch.float64)
    monkeypatch.setattr(mesh, "get_local_rank", lambda: 1)  # as if these were experts 4 to 7
    hidden = torch.randn(3, H, dtype=torch.float64, requires_grad=True)
    output = experts(hidden, torch.tensor([[0, 1]] * 3), torch.full((3, 2), 0.5, dtype=torch.float64))
    output.sum().backward()
    assert not output.any()
    assert not any(gradient(one).any() for one in (hidden, *experts.parameters()))


def gradient(of: Tensor) -> Tensor:
    assert of.grad is not None
    return own(of.grad)
