"""A tiny Nemotron 3 Nano Omni that hears, on one GPU: the trainer's policies against transformers on the host.

Run: python -m pytest -s -m gpu tests/gpu/test_policy_sounds_gpu.py
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.gpu.nemotron_on_gpu import three_steps
from tests.integration.hearing_world import batch_for, plain_logprobs

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
    _, before, moved = three_steps(source, backend, dtype, batch, expected)
    heard = {name for name in before if name.startswith("sound_encoder.") and name.endswith("q_proj.weight")}
    assert heard and moved >= heard and not any("running_" in name for name in moved)
