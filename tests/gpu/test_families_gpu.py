"""The tiny Qwen families in vLLM on one GPU, in bfloat16: loaded by its own loader, sampled, held against transformers on the host.

Run: python -m pytest -s -m gpu tests/gpu/test_families_gpu.py    (one engine start a family)
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet_trainer.tiny.checkpoint import write_checkpoint
from omnifleet_trainer.tiny.families import MODELS
from omnifleet_trainer.tiny.mixture import write_mixture
from tests.child_result import result_of
from tests.gpu.missed_weights import MISSED

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(300),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

FAMILIES: dict[str, tuple[Callable[[Path], None], str]] = {
    family: (partial(write_checkpoint, family=family), model) for family, model in MODELS.items()
} | {"qwen3_vl_moe": (write_mixture, "Qwen3VLMoeForConditionalGeneration")}
"""How each is written, and the class that vLLM is to take for it."""

ENGINE = (
    MISSED
    + """import json, os, sys
os.environ |= {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
               "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_USE_FLASHINFER_SAMPLER": "0"}


def main():
    import numpy
    from PIL import Image
    from vllm import LLM, SamplingParams

    folder, dtype = sys.argv[1], sys.argv[2]
    config = json.load(open(folder + "/config.json"))
    ids = [config[name] for name in ("vision_start_token_id", "image_token_id", "vision_end_token_id")]
    engine = LLM(model=folder, dtype=dtype, enforce_eager=True, max_model_len=256, max_num_seqs=8,
                 kv_cache_memory_bytes=256 << 20, enable_prefix_caching=False, skip_mm_profiling=True,
                 limit_mm_per_prompt={"image": 1, "video": 0}, logprobs_mode="raw_logprobs")

    banned = dict.fromkeys([*ids, config["video_token_id"]], -100.0)
    drawn = SamplingParams(temperature=1.0, max_tokens=64, logprobs=0, ignore_eos=True, n=8, seed=1, logit_bias=banned)

    def replies(prompt):
        (done,) = engine.generate([prompt], drawn, use_tqdm=False)
        rows = [[row[token].logprob for token, row in zip(reply.token_ids, reply.logprobs)] for reply in done.outputs]
        return {"prompt": list(done.prompt_token_ids), "ids": [list(reply.token_ids) for reply in done.outputs],
                "logprobs": rows}

    text = list(range(40, 90))
    picture = Image.fromarray(numpy.random.default_rng(3).integers(0, 256, (128, 128, 3), numpy.uint8))
    asked = {
        "text": lambda: replies({"prompt_token_ids": text}),
        "picture": lambda: replies({"prompt_token_ids": [*text, *ids, *text[:9]],
                                    "multi_modal_data": {"image": picture}}),
        "model": lambda: engine.apply_model(lambda model: type(model).__name__)[0],
        "missed": lambda: engine.apply_model(missed)[0],
    }
    result = {"failed": {}}
    for name, ask in asked.items():  # what one cannot do leaves the numbers of the others
        try:
            result[name] = ask()
        except Exception as error:
            result["failed"][name] = repr(error)
    print("RESULT " + json.dumps(result))


main()
"""
)


def mean_error(model: Any, said: dict[str, Any], arguments: dict[str, Any]) -> float:
    """TMPE of an engine's replies to one prompt against a model of transformers, which is also given `arguments`."""
    start, errors = len(said["prompt"]), []
    for ids, logprobs in zip(said["ids"], said["logprobs"], strict=True):
        everything = torch.tensor([[*said["prompt"], *ids]])
        types = (everything == model.config.image_token_id).int()
        model.model.rope_deltas = None
        with torch.no_grad():
            logits = model(
                input_ids=everything, mm_token_type_ids=types, use_cache=False, **arguments
            ).logits[0]
        known = logits.float().log_softmax(-1)[start - 1 : -1]
        errors.append((known.gather(1, torch.tensor(ids)[:, None])[:, 0] - torch.tensor(logprobs)).abs())
    assert sum(len(one) for one in errors) == 512
    return float(torch.cat(errors).exp().mean())


def pixels(folder: Path) -> dict[str, Any]:
    """The child's picture as transformers' processor makes it."""
    import numpy as np
    from PIL import Image
    from transformers import AutoImageProcessor

    picture = Image.fromarray(np.random.default_rng(3).integers(0, 256, (128, 128, 3), np.uint8))
    found = AutoImageProcessor.from_pretrained(folder)(images=[picture], return_tensors="pt")
    return {name: found[name] for name in ("pixel_values", "image_grid_thw")}


def check(family: str, folder: Path, dtype: str) -> None:
    """Every weight arrives; TMPE of text and of a picture below 1.05 against transformers in float32 on the host."""
    from transformers import AutoModelForImageTextToText

    write, name = FAMILIES[family]
    write(folder)
    result = result_of(ENGINE, str(folder), dtype)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
    given = {"text": {}, "picture": pixels(folder)}
    errors = {what: mean_error(model, result[what], given[what]) for what in given if what in result}
    shown = ", ".join(f"{what} {error:.5f}" for what, error in errors.items())
    print(f"\n{family} vLLM {dtype}: TMPE {shown}", flush=True)
    assert result["failed"] == {} and result["missed"] == [] and result["model"] == name
    assert result["picture"]["prompt"].count(model.config.image_token_id) >= 16
    assert max(errors.values()) < 1.05


@pytest.mark.parametrize("family", FAMILIES)
def test_vllm_loads_and_samples_it(family: str, tmp_path: Path) -> None:
    check(family, tmp_path / "model", "bfloat16")
