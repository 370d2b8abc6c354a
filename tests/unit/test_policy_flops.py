"""FLOPs of a step by hand."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from torch import nn

from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.flops import FlopsModel, mfu
from tests.unit.step_world import sample


def test_a_step_by_hand() -> None:
    """One sample of 5 tokens: products 2 x 100 x 5 = 1000, attention 2 x 4 x 25 = 200."""
    batch = StepBatch([sample("a", "g", 1.0, [1, 2, 3])], 1)
    model = FlopsModel(decoder=100, tower=10, trained=1.0, attention=4)
    plain = {"passes": 0, "patches": 0, "tower_trains": False}
    assert model.of_step(batch, **plain) == 3 * 1000 + 3 * 200
    assert model.of_step(batch, **(plain | {"passes": 2})) == 5 * 1200
    assert model.of_step(batch, **(plain | {"patches": 7})) == 3600 + 2 * 10 * 7
    assert model.of_step(batch, **(plain | {"patches": 7, "tower_trains": True})) == 3600 + 3 * 140
    frozen = FlopsModel(decoder=100, tower=10, trained=0.5, attention=4)
    assert frozen.of_step(batch, **plain) == 2.5 * 1000 + 600
    assert mfu(5e12, 10.0, 2.0) == pytest.approx(0.25)


class Mixture(nn.Module):
    """8 experts, 2 chosen; a tied head over 16 ids."""

    def __init__(self) -> None:
        super().__init__()
        text = SimpleNamespace(
            num_experts=8,
            num_experts_per_tok=2,
            tie_word_embeddings=True,
            vocab_size=16,
            hidden_size=4,
            num_attention_heads=2,
            num_hidden_layers=3,
        )
        self.config = SimpleNamespace(text_config=text)
        self.embed_tokens = nn.Embedding(16, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(8)])
        self.mlp = nn.ModuleDict({"experts": self.experts})
        self.visual = nn.Linear(5, 4)
        self.visual.weight.requires_grad_(False)

    def get_output_embeddings(self) -> nn.Embedding:
        return self.embed_tokens


def test_chosen_experts_and_a_tied_head_are_counted() -> None:
    model = Mixture()
    del model.experts
    flops = FlopsModel.of(model, ("visual.",))
    assert flops.decoder == 2 * 16 + 16 * 4
    assert flops.tower == 20 and flops.trained == 1.0
    assert flops.attention == 3 * 2 * 2
