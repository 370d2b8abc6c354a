"""Logprobs without logits, on the sampler's support, and with the engine's experts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from omnifleet_trainer.objectives.logprobs import hidden_logprobs, token_logprobs
from omnifleet_trainer.objectives.routing import replayed_gates, replayed_sigmoid_gates, replaying


def operands(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(seed)
    hidden = torch.randn(2, 7, 5, dtype=torch.float64, generator=random, requires_grad=True)
    head = torch.randn(13, 5, dtype=torch.float64, generator=random, requires_grad=True)
    return hidden, head, torch.randint(0, 13, (2, 7), generator=random)


@pytest.mark.parametrize("chunk", [1, 3, 14, 100])
def test_hidden_states_give_the_same_values_and_gradients_as_logits(chunk: int) -> None:
    hidden, head, ids = operands()
    weight = torch.randn(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    plain = token_logprobs(hidden @ head.T, ids, temperature=0.7)
    expected = torch.autograd.grad((plain * weight).sum(), (hidden, head))
    chunked = hidden_logprobs(hidden, head, ids, temperature=0.7, chunk=chunk)
    found = torch.autograd.grad((chunked * weight).sum(), (hidden, head))
    torch.testing.assert_close(chunked, plain)
    torch.testing.assert_close(found, expected)


def test_no_positions_and_no_gradient() -> None:
    hidden, head, ids = operands()
    with torch.no_grad():
        assert hidden_logprobs(hidden[:, :0], head, ids[:, :0]).shape == (2, 0)
        assert not hidden_logprobs(hidden, head, ids, chunk=2).requires_grad
    with pytest.raises(ValueError, match="temperature"):
        hidden_logprobs(hidden, head, ids, temperature=0)


def test_kept_ids_replay_the_samplers_filter() -> None:
    """By hand: logits 0, ln 2, ln 4 and the filter kept ids 0 and 1: 1/3 and 2/3. -1 pads; the target always counts."""
    logits = torch.log(torch.tensor([[[1.0, 2.0, 4.0]] * 4], dtype=torch.float64))
    ids = torch.tensor([[0, 1, 1, 2]])
    kept = torch.tensor([[[0, 1], [1, 0], [0, -1], [-1, -1]]])
    found = token_logprobs(logits, ids, kept=kept).exp()[0].tolist()
    assert found == pytest.approx([1 / 3, 2 / 3, 2 / 3, 4 / 7])


@pytest.fixture(scope="module")
def mixture() -> Any:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=17,
        hidden_size=16,
        intermediate_size=16,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
    )
    model = Qwen3MoeForCausalLM(config).eval()
    for module in routers_of(model).values():
        nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(3))
    return model


def routers_of(model: Any) -> dict[str, nn.Module]:
    return {name: module for name, module in model.named_modules() if name.endswith("mlp.gate")}


def test_replayed_gates_by_hand() -> None:
    logits = torch.log(torch.tensor([[1.0, 2.0, 4.0, 8.0]], dtype=torch.float64))
    assert replayed_gates(logits, torch.tensor([[3, 0]]))[0].tolist() == pytest.approx([8 / 9, 1 / 9])
    shares = replayed_gates(logits, torch.tensor([[3, 0]]), normalised=False)
    assert shares[0].tolist() == pytest.approx([8 / 15, 1 / 15])
    apart = replayed_sigmoid_gates(logits, torch.tensor([[3, 0]]), scale=2.0)  # σ(log x) = x / (1 + x)
    assert apart[0].tolist() == pytest.approx([2 * (8 / 9) / (8 / 9 + 1 / 2), 2 * (1 / 2) / (8 / 9 + 1 / 2)])
    alone = replayed_sigmoid_gates(logits, torch.tensor([[3, 0]]), normalised=False)
    assert alone[0].tolist() == pytest.approx([8 / 9, 1 / 2])


def test_replaying_a_models_own_choice_changes_nothing_and_another_does(mixture: Any) -> None:
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    routers, chosen = routers_of(mixture), {}
    hooks = [
        router.register_forward_hook(lambda m, i, out, name=name: chosen.update({name: out[2].detach()}))
        for name, router in routers.items()
    ]
    plain = mixture(ids).logits
    for hook in hooks:
        hook.remove()
    assert len(chosen) == 2
    with replaying(routers, chosen):
        same = mixture(ids).logits
    torch.testing.assert_close(same, plain, rtol=1e-4, atol=1e-5)
    others = {name: 3 - choice for name, choice in chosen.items()}
    with replaying(routers, others):
        forced = mixture(ids).logits
        (gradient,) = torch.autograd.grad(forced.sum(), next(iter(routers.values())).weight)
    assert not torch.allclose(forced, plain, atol=1e-3)
    assert gradient.abs().max() > 0, "the gradient goes through the router's own scores"
    torch.testing.assert_close(mixture(ids).logits, plain)


def test_a_replay_that_does_not_fit_is_refused(mixture: Any) -> None:
    routers = routers_of(mixture)
    with pytest.raises(ValueError, match="no router is called nowhere"):
        with replaying(routers, {"nowhere": torch.zeros(1, 2, dtype=torch.long)}):
            pass
    name = next(iter(routers))
    with replaying(routers, {name: torch.zeros(3, 2, dtype=torch.long)}):
        with pytest.raises(ValueError, match="shape"):
            mixture(torch.tensor([[1, 2]]))
