"""A tiny mixture of experts in AutoModel: what its routers choose is what the engine chose."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3VLMoeConfig, Qwen3VLMoeForConditionalGeneration

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.policy.automodel import AutoModelPolicy
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.replay import check_replayable
from tests.integration.family_world import close_to
from tests.unit.step_world import sample

pytestmark = pytest.mark.heavy
LAYERS, EXPERTS, CHOSEN = 2, 4, 2


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("mixture")
    torch.manual_seed(3)
    text = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 32, "moe_intermediate_size": 16,
        "num_hidden_layers": LAYERS, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 16,
        "num_experts": EXPERTS, "num_experts_per_tok": CHOSEN, "decoder_sparse_step": 1, "mlp_only_layers": [],
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
    }  # fmt: skip
    tower = {
        "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 32,
        "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
    }  # fmt: skip
    config = Qwen3VLMoeConfig(
        text_config=text, vision_config=tower, image_token_id=60, video_token_id=61, tie_word_embeddings=False
    )
    model = Qwen3VLMoeForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if name.endswith("mlp.gate.weight"):
            torch.nn.init.normal_(weight)
    model.save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def policy(source: Path) -> Iterator[AutoModelPolicy]:
    trainer = TrainerConfig(optimizer=OptimizerConfig(lr=1e-3), threads=1, micro_batch_tokens=150)
    policy = AutoModelPolicy(Job(source, trainer, ObjectiveConfig()))
    yield policy
    policy.close()


def batch_of(choice: int | None) -> StepBatch:
    """Two samples; choice: first of the `CHOSEN` experts that every token goes to, None = the routers' own."""
    samples = [sample("a", "g", 1.0, [5, 6, 8, 3]), sample("b", "g", 0.0, [7, 9])]
    if choice is not None:
        for i, one in enumerate(samples):
            one.experts = np.empty((one.length - 1, LAYERS, CHOSEN), np.uint8)
            one.experts[..., 0], one.experts[..., 1] = choice, (choice + 1 + i) % EXPERTS
    return StepBatch(samples, 1)


def by_hand(source: Path, one: TrainingSample) -> torch.Tensor:
    """Logprobs of a reply by plain transformers, whose routers were replaced by a few lines of their own."""
    model: Any = Qwen3VLMoeForConditionalGeneration.from_pretrained(source).eval()
    assert one.experts is not None
    for layer, block in enumerate(model.model.language_model.layers):
        gate = block.mlp.gate
        choice = torch.tensor(one.experts[:, layer].astype(int))
        choice = torch.cat([choice, torch.tensor([[0, 1]])])  # of the last token, which predicts nothing

        def forward(hidden: torch.Tensor, gate: Any = gate, choice: torch.Tensor = choice) -> Any:
            scores = torch.nn.functional.linear(hidden.reshape(-1, gate.hidden_dim), gate.weight)
            weights = torch.stack([row[picked].exp() for row, picked in zip(scores, choice, strict=True)])
            return scores, weights / weights.sum(-1, keepdim=True), choice

        gate.forward = forward
    ids = torch.tensor([one.prompt_token_ids + one.token_ids])
    with torch.no_grad():
        logprobs = model(input_ids=ids, use_cache=False).logits.log_softmax(-1)[0, :-1]
    start = len(one.prompt_token_ids) - 1
    return logprobs[start:].gather(-1, ids[0, start + 1 :, None])[:, 0]


def test_logprobs_are_those_of_the_experts_that_the_engine_chose(
    policy: AutoModelPolicy, source: Path
) -> None:
    forced = batch_of(1)
    ours = policy.logprobs(forced)
    close_to(ours, [by_hand(source, one) for one in forced.samples], rtol=1e-5)
    own = policy.logprobs(batch_of(None))
    assert max(float(np.abs(a - b).max()) for a, b in zip(ours, own, strict=True)) > 1e-3


def test_a_step_trains_the_replayed_experts_only(policy: AutoModelPolicy) -> None:
    before = {name: tensor.clone() for name, tensor in policy.export()}
    batch = batch_of(0)
    for one in batch.samples:
        one.experts[..., 1] = 1
        one.advantage = 1.0 if one.trajectory_id == "a" else -1.0
    metrics = policy.train(batch)
    assert np.isfinite(metrics["loss"]) and metrics["grad_norm"] > 0
    for name, tensor in policy.export():
        if name.endswith("experts.down_proj"):
            moved = [bool((tensor[e] != before[name][e]).any()) for e in range(EXPERTS)]
            assert moved == [True, True, False, False], name


def test_another_number_of_mixture_layers_is_refused(policy: AutoModelPolicy) -> None:
    batch = batch_of(0)
    for one in batch.samples:
        one.experts = one.experts[:, :1]
    with pytest.raises(OmnifleetError, match="1 mixture layers"):
        policy.logprobs(batch)


def test_a_model_whose_routing_cannot_be_replayed_is_refused_before_it_is_loaded(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "nemotron_h"}')
    with pytest.raises(OmnifleetError, match="nemotron_h") as refused:
        check_replayable(tmp_path)
    assert (refused.value.reason, refused.value.knob) == (
        Reason.UNSUPPORTED,
        "rollout.engine.return_routed_experts",
    )


def test_a_snapshot_leaves_the_folder_that_save_leaves(policy: AutoModelPolicy, tmp_path: Path) -> None:
    """What a checkpoint beside the next step is made of must load as what one in between is made of."""
    policy.save(tmp_path / "saved")
    policy.snapshot()(tmp_path / "beside")
    for folder in ("saved", "beside"):
        policy.load(tmp_path / folder)
    files = {
        folder: sorted(str(path.relative_to(tmp_path / folder)) for path in (tmp_path / folder).rglob("*"))
        for folder in ("saved", "beside")
    }
    assert files["saved"] == files["beside"] and "policy/config.json" in files["beside"]
