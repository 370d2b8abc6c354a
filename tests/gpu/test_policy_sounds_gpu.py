"""A tiny Nemotron 3 Nano Omni that hears, on one GPU: the trainer's policies against transformers on the host.

Run: python -m pytest -s -m gpu tests/gpu/test_policy_sounds_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.integration.family_world import close_to
from tests.integration.hearing_world import batch_for, plain_logprobs
from tests.integration.nemotron_world import TEMPERATURE

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hearing") / "model"
    write_hybrid(folder, sound=True)
    return folder


@pytest.mark.parametrize(
    ("backend", "dtype"), [("automodel", "float32"), ("automodel", "bfloat16"), ("megatron", "float32")]
)
def test_a_policy_hears_on_a_gpu_what_transformers_hears_on_the_host(
    source: Path, backend: str, dtype: str
) -> None:
    """Logprobs to 1e-3 of the largest (bfloat16 3e-2); three steps that move the encoder of sounds."""
    from transformers import AutoModelForImageTextToText

    plain, batch = (
        AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval(),
        batch_for(source),
    )
    with torch.no_grad():
        expected = [plain_logprobs(plain, sample, batch) for sample in batch.samples]
    optimizer = OptimizerConfig(lr=1e-3, warmup_steps=2)
    trainer = TrainerConfig(backend=backend, optimizer=optimizer, micro_batch_tokens=300, dtype=dtype)
    policy = open_rank(Job(source, trainer, ObjectiveConfig(), temperature=TEMPERATURE), ALONE)
    try:
        found = policy.logprobs(batch)
        before = {name: tensor.cpu().clone() for name, tensor in policy.export()}
        steps = [policy.train(batch) for _ in range(3)]
        after = {name: tensor.cpu().clone() for name, tensor in policy.export()}
    finally:
        policy.close()
    worst = max(abs(torch.as_tensor(a).cpu() - b).max() for a, b in zip(found, expected, strict=True))
    shown = ", ".join(f"{step['loss']:.4g}/{step['grad_norm']:.4g}" for step in steps)
    print(f"\nsounds {backend} {dtype}: worst {worst:.2g} nats; loss/grad_norm {shown}")
    close_to(found, expected, rtol=3e-2 if dtype == "bfloat16" else 1e-3)
    moved = {name for name in before if not torch.equal(before[name], after[name])}
    heard = {name for name in before if name.startswith("sound_encoder.") and name.endswith("q_proj.weight")}
    assert heard and moved >= heard and not any("running_" in name for name in moved)
