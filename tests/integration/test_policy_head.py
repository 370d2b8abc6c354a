"""Logprobs in chunks of positions: the same training as with all logits at once."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.head import plain_head
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from tests.integration.test_policy_automodel import batch_of, on_policy, open_tiny, weights_of

pytestmark = pytest.mark.heavy


def trained(source: Path, **settings: Any) -> tuple[list[Any], dict[str, torch.Tensor], dict[str, float]]:
    policy = open_tiny(source, **settings)
    try:
        image_token = int(json.loads((source / "config.json").read_text())["image_token_id"])
        batch = on_policy(policy, batch_of(image_token))
        metrics = policy.train(batch)
        return policy.logprobs(batch), weights_of(policy), metrics
    finally:
        policy.close()


def test_chunks_of_positions_train_the_same(tmp_path: Path) -> None:
    write_checkpoint(tmp_path)
    plain, weights, metrics = trained(tmp_path)
    chunked, others, same = trained(tmp_path, logprob_chunk=3, peak_tflops=0.1)
    for ours, theirs in zip(chunked, plain, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-3)
    moved = sum((others[name] - tensor).abs().sum() for name, tensor in weights.items())
    assert moved < 1e-3 * sum(tensor.abs().sum() for tensor in weights.values())
    assert same["grad_norm"] == pytest.approx(metrics["grad_norm"], rel=1e-4)
    assert same["loss"] == pytest.approx(metrics["loss"], rel=1e-4, abs=1e-6)
    assert "mfu" not in metrics and 0 < same["mfu"] < 1


class Capped(nn.Module):
    """A head with a soft cap, as some models have it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)
        self.head = nn.Linear(4, 8, bias=False)

    def get_output_embeddings(self) -> nn.Linear:
        return self.head

    def model(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(last_hidden_state=self.embedding(input_ids))

    def forward(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        return SimpleNamespace(logits=torch.tanh(self.head(self.embedding(input_ids))))


def test_a_head_that_is_more_than_a_product_is_refused() -> None:
    with pytest.raises(OmnifleetError, match="more than a matrix product") as refused:
        plain_head(Capped())
    assert refused.value.reason is Reason.UNSUPPORTED and refused.value.knob == "trainer.logprob_chunk"
