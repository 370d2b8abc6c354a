"""Real vLLM engines on GPUs and tiny weights for them, for the tests of refits."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import torch

from omnifleet.auth import OPEN
from omnifleet.client.refit import RefitClient
from omnifleet.config.services import RolloutConfig
from omnifleet.telemetry.counters import Counters
from omnifleet.wire import refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.server import serving

ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 512,
    "max_num_seqs": 4,
    "gpu_memory_utilization": 0.1,
    "kv_cache_memory_bytes": 1 << 28,
    "enforce_eager": True,
    "threads": 2,
}
DEADLINE_S = 60.0


def checkpoint(out: Path, *, tied: bool, ranks: int = 1) -> dict[str, Any]:
    """A tiny Qwen2-VL in bfloat16, for engines of so many ranks; its tensors."""
    from safetensors.torch import load_file, save_file

    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(out, seed=3, tie_embeddings=tied, hidden=128 * ranks)
    config = json.loads((out / "config.json").read_text())
    config["vision_config"]["num_heads"] = ranks  # one head cannot be split
    (out / "config.json").write_text(json.dumps(config))
    weights = {name: t.bfloat16() for name, t in load_file(out / "model.safetensors").items()}
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return weights


def moved(weights: dict[str, Any], step: int, names: set[str]) -> dict[str, Any]:
    """The weights of a step: those named differ from step to step."""
    generator = torch.Generator().manual_seed(step)
    return {
        name: (t + 0.01 * torch.randn(t.shape, generator=generator)).bfloat16() if name in names else t
        for name, t in weights.items()
    }


def nudged(weights: dict[str, Any], names: set[str]) -> dict[str, Any]:
    """The same weights, but for one value of each tensor named."""
    changed = {name: t.clone() for name, t in weights.items() if name in names}
    for tensor in changed.values():
        tensor.view(-1)[tensor.numel() // 2] += 1
    return weights | changed


@asynccontextmanager
async def engine_on(gpus: str, model: Path, **settings: Any) -> AsyncIterator[Any]:
    """A started engine. gpus: as in CUDA_VISIBLE_DEVICES. settings: of `rollout.engine`, besides ENGINE."""
    from omnifleet_rollout.engine.vllm_engine import VllmEngine
    from omnifleet_rollout.engine.vllm_launch import set_environment

    async def no_media() -> str:
        raise RuntimeError("no media here")

    config = RolloutConfig.model_validate({"engine": ENGINE | settings})
    set_environment(config.engine)
    os.environ["CUDA_VISIBLE_DEVICES"] = gpus
    engine = VllmEngine(model, config, find_media=no_media, secret="")
    try:
        await engine.start()
        del os.environ["CUDA_VISIBLE_DEVICES"]
        yield engine
    finally:
        os.environ.pop("CUDA_VISIBLE_DEVICES", None)
        await engine.shutdown()


@asynccontextmanager
async def refit_client(engine: Any) -> AsyncIterator[RefitClient]:
    from omnifleet_rollout.refit.receiver import Receiver
    from omnifleet_rollout.worker.gate import Gate
    from omnifleet_rollout.worker.server import RefitServicer
    from omnifleet_rollout.worker.standing import Standing

    gate = Gate(Standing("w", base_version(engine.facts.tensors)), limit=8)
    servicer = RefitServicer(engine, Receiver(engine, gate, Counters("gpu")), gate)
    async with (
        serving(
            "127.0.0.1:0",
            lambda server: refit_pb2_grpc.add_RefitServicer_to_server(servicer, server),
            tokens=OPEN,
            knob="test",
            grace_s=0,
        ) as address,
        RefitClient.open(address) as client,
    ):
        yield client


def logprobs_of(
    folder: Path, weights: dict[str, Any], prompt: Sequence[int], reply: Sequence[int]
) -> list[float]:
    """Logprobs of a reply by transformers in float32 on the host, nats: what stands for the trainer's own."""
    from safetensors.torch import save_file
    from transformers import Qwen2VLForConditionalGeneration

    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    model = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([[*prompt, *reply]])
    with torch.no_grad():
        logprobs = model(input_ids=ids).logits[0].log_softmax(-1)
    return [float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(reply)]
