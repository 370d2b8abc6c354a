"""Logprobs of tokens; field case LPR-01."""

from __future__ import annotations

import math

import pytest
import torch

from omnifleet_trainer.objectives.logprobs import token_logprobs


def test_lpr_01_temperature_divides_the_logits() -> None:
    logits = torch.tensor([[[1.5, 0.5, 0.0, -1.0]]])
    warm = token_logprobs(logits, torch.tensor([[0]]), temperature=0.6)
    raw = token_logprobs(logits, torch.tensor([[0]]))
    assert warm.item() == pytest.approx(-0.2518977, abs=1e-6)
    assert raw.item() == pytest.approx(-0.5146750, abs=1e-6)
    assert math.exp(warm.item() - raw.item()) == pytest.approx(1.3005370, abs=1e-6)


def test_chunks_change_neither_values_nor_gradients() -> None:
    torch.manual_seed(0)
    logits, targets = torch.randn(3, 7, 11, dtype=torch.float64), torch.randint(0, 11, (3, 7))
    results = []
    for chunk in (1, 4, 1000):
        leaf = logits.clone().requires_grad_()
        values = token_logprobs(leaf, targets, temperature=0.7, chunk=chunk)
        (values * torch.arange(21).view(3, 7)).sum().backward()
        results.append((values.detach(), leaf.grad))
    expected = torch.log_softmax(logits / 0.7, -1).gather(-1, targets[..., None])[..., 0]
    for values, gradient in results:
        torch.testing.assert_close(values, expected)
        torch.testing.assert_close(gradient, results[0][1])


def test_bfloat16_logits_are_widened() -> None:
    logits = torch.randn(1, 2, 50).bfloat16()
    values = token_logprobs(logits, torch.tensor([[3, 4]]))
    assert values.dtype == torch.float32
    torch.testing.assert_close(values, torch.log_softmax(logits.float(), -1)[0, [0, 1], [3, 4]][None])


def test_greedy_has_no_density() -> None:
    with pytest.raises(ValueError, match="temperature"):
        token_logprobs(torch.zeros(1, 1, 2), torch.zeros(1, 1, dtype=torch.long), temperature=0.0)
