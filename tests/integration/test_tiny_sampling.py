"""Tiny models of several families sampled by vLLM's CPU engine: its raw logprobs are transformers', bans or not. Text alone."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.hybrid import TOWER, write_hybrid
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.child_result import result_of

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(300)]

CHILD = """
import json, math, os, sys
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "OMP_NUM_THREADS": "1",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}


def main():
    import torch
    import torch._dynamo.config
    torch.set_num_threads(1)
    torch._dynamo.config.disable = True
    from transformers import AutoModelForImageTextToText
    from vllm import LLM, SamplingParams

    folder, overrides, banned = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
    engine = LLM(model=folder, dtype="float32", enforce_eager=True, max_model_len=256, max_num_seqs=4, hf_overrides=overrides,
                 kv_cache_memory_bytes=128 << 20, enable_prefix_caching=False, skip_mm_profiling=True,
                 limit_mm_per_prompt={"image": 1, "video": 0}, logprobs_mode="raw_logprobs")
    prompt = list(range(40, 90))
    drawn = SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True, n=8, seed=1,
                           logit_bias={token: -100.0 for token in banned} or None)
    replies = engine.generate([{"prompt_token_ids": prompt}], drawn, use_tqdm=False)[0].outputs
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    errors, seen = [], set()
    for reply in replies:
        ids = torch.tensor([[*prompt, *reply.token_ids]])
        with torch.no_grad():
            known = torch.log_softmax(model(input_ids=ids).logits.float(), -1)[0, len(prompt) - 1 :]
        for at, (token, row) in enumerate(zip(reply.token_ids, reply.logprobs)):
            errors.append(math.exp(abs(row[token].logprob - known[at, token].item())))
            seen.add(token)
    print("RESULT " + json.dumps({"tmpe": sum(errors) / len(errors), "tokens": len(errors), "seen": sorted(seen)}))


main()
"""


@pytest.mark.parametrize(
    ("write", "overrides", "banned"),
    [
        (write_hybrid, {"vit_hidden_size": TOWER}, []),
        (write_mixture, {}, list(range(50, 61))),
        (partial(write_checkpoint, family="qwen3_vl"), {}, []),
        (partial(write_checkpoint, family="qwen2_5_vl"), {}, []),
        (partial(write_checkpoint, family="qwen2_vl"), {}, []),
    ],
    ids=["nemotron omni", "qwen3-vl moe with bans", "qwen3-vl", "qwen2.5-vl", "qwen2-vl"],
)
def test_vllm_samples_what_transformers_computes(
    write: Callable[[Path], None], overrides: dict[str, Any], banned: list[int], tmp_path: Path
) -> None:
    write(tmp_path / "model")
    result = result_of(CHILD, str(tmp_path / "model"), json.dumps(overrides), json.dumps(banned))
    assert result["tokens"] == 512 and result["tmpe"] == pytest.approx(1.0, abs=1e-4)
    assert not set(result["seen"]) & set(banned) and len(result["seen"]) > 100
