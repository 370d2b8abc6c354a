"""The recorded plan on vLLM's own Qwen2-VL class, before the CPU build packs it: what the plan makes is what the loader makes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(300)]

CHILD = """
import json, sys
from pathlib import Path
import torch
from omnifleet.config.services import EngineConfig
from omnifleet_rollout.engine.vllm_launch import set_environment
set_environment(EngineConfig(dtype="float32"))
from safetensors.torch import load_file
from vllm.config import set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.model_loader.utils import initialize_model
from omnifleet_rollout.refit.plan import agrees, record, replay, state_digests

folder = sys.argv[1]
config = EngineArgs(model=folder, dtype="float32", max_model_len=256, enforce_eager=True).create_engine_config()
sources = load_file(Path(folder) / "model.safetensors")
table = {name: (t.dtype, list(t.shape)) for name, t in sources.items()}
with set_current_vllm_config(config):
    init_distributed_environment(1, 0, f"file://{sys.argv[2]}", 0, "gloo")
    initialize_model_parallel(1)
    with torch.device("cpu"):
        model = initialize_model(config)
    before = state_digests(model)
    plan = record(model, model.load_weights, table, "test")
    moved = [name for name, digest in state_digests(model).items() if before[name] != digest]
    with torch.no_grad():
        model.load_weights(iter(sources.items()))
        loaded = state_digests(model)
        for parameter in model.parameters():
            parameter.fill_(7)
        replay(plan.bind(model, sources))
    replayed = state_digests(model)
    different = [name for name in loaded if loaded[name] != replayed[name]]
    new = {name: torch.randn_like(t) for name, t in sources.items()}
    checked = agrees(model, plan, new, lambda: model.load_weights(iter(new.items())))
fused = {move.target for move in plan.moves if "qkv_proj" in move.target or "gate_up_proj" in move.target}
print("RESULT " + json.dumps({
    "moved": moved, "different": different, "checked": checked, "moves": len(plan.moves), "fused": sorted(fused),
    "unread": list(plan.unread), "untouched": list(plan.untouched), "sources": len(sources),
}))
"""


@pytest.mark.parametrize("tied", [False, pytest.param(True, marks=pytest.mark.soak)], ids=["untied", "tied"])
def test_a_plan_of_qwen2_vl_equals_its_loader(tmp_path: Path, tied: bool) -> None:
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(tmp_path / "model", seed=0, tie_embeddings=tied)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, str(tmp_path / "model"), str(tmp_path / "meet")],
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result = json.loads(line.removeprefix("RESULT "))
    assert result["moved"] == [], "recording moves nothing"
    assert result["different"] == [] and result["checked"] == []
    assert result["unread"] == [] and result["untouched"] == []
    assert result["moves"] >= result["sources"] and len(result["fused"]) >= 4
