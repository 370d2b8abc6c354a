"""Nemotron 3 Nano Omni, tiny, on one GPU: the trainer's policies against transformers on the host, and vLLM with its experts.

vLLM's CPU build has no experts of this kind. Run: python -m pytest -s -m gpu tests/gpu/test_nemotron_gpu.py
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet_trainer.tiny.hybrid import DENSE, MIXED, TOWER, write_hybrid
from tests.child_result import result_of
from tests.gpu.missed_weights import MISSED
from tests.gpu.nemotron_on_gpu import three_steps
from tests.integration.nemotron_world import batch_for, plain_logprobs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]
PATTERNS = {"dense": DENSE, "mixture": MIXED}

ENGINE = (
    MISSED
    + """import json, math, os, sys
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def main():
    from vllm import LLM, SamplingParams

    folder, overrides = sys.argv[1], json.loads(sys.argv[2])
    engine = LLM(model=folder, dtype="bfloat16", enforce_eager=True, max_model_len=256, max_num_seqs=8,
                 hf_overrides=overrides, kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False,
                 skip_mm_profiling=True, limit_mm_per_prompt={"image": 1, "video": 0}, logprobs_mode="raw_logprobs")

    prompt = list(range(40, 90))
    drawn = SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True, n=8, seed=1)
    replies = engine.generate([{"prompt_token_ids": prompt}], drawn, use_tqdm=False)[0].outputs
    ids = [list(reply.token_ids) for reply in replies]
    logprobs = [[row[token].logprob for token, row in zip(reply.token_ids, reply.logprobs)] for reply in replies]
    kind, gaps = engine.apply_model(lambda model: (type(model).__name__, missed(model)))[0]
    print("RESULT " + json.dumps({"prompt": prompt, "ids": ids, "logprobs": logprobs, "model": kind, "missed": gaps}))


main()
"""
)


@pytest.fixture(scope="module", params=PATTERNS)
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nemotron") / request.param
    write_hybrid(folder, pattern=PATTERNS[request.param])
    return folder


@pytest.fixture(scope="module")
def plain(source: Path) -> Any:
    """transformers' model in float32 on the host."""
    from transformers import AutoModelForImageTextToText

    return AutoModelForImageTextToText.from_pretrained(source, dtype=torch.float32).eval()


@pytest.mark.parametrize(
    ("backend", "dtype"), [("automodel", "float32"), ("automodel", "bfloat16"), ("megatron", "float32")]
)
def test_a_policy_computes_on_a_gpu_what_transformers_computes_on_the_host(
    source: Path, plain: Any, backend: str, dtype: str
) -> None:
    """Logprobs of text, pictures and clips to 1e-3 of the largest (bfloat16 3e-2); three steps that train."""
    batch = batch_for(source)
    with torch.no_grad():
        expected = [plain_logprobs(plain, sample, batch) for sample in batch.samples]
    steps, before, moved = three_steps(source, backend, dtype, batch, expected)
    assert all(0 < step["grad_norm"] < 1e4 for step in steps)
    assert moved >= {name for name in before if name.endswith(("in_proj.weight", "lm_head.weight"))} != set()


def test_vllm_loads_and_samples_it(source: Path, plain: Any) -> None:
    """Every weight arrives by vLLM's own loader; TMPE below 1.05 in bfloat16 against transformers in float32."""
    result = result_of(ENGINE, str(source), json.dumps({"vit_hidden_size": TOWER}))
    missed = [name for name in result["missed"] if not name.endswith((".ls1", ".ls2"))]
    assert missed == [] and result["model"] == "NemotronH_Nano_VL_V2"
    errors = []
    for ids, logprobs in zip(result["ids"], result["logprobs"], strict=True):
        with torch.no_grad():
            logits = plain(input_ids=torch.tensor([[*result["prompt"], *ids]])).logits[0]
        known = logits.log_softmax(-1)[len(result["prompt"]) - 1 :]
        errors += [abs(said - float(known[at, ids[at]])) for at, said in enumerate(logprobs)]
    tmpe = float(torch.tensor(errors).exp().mean())
    print(f"\nnemotron {source.name} vLLM bfloat16: TMPE {tmpe:.5f} over {len(errors)} tokens")
    assert len(errors) == 512 and tmpe < 1.05
