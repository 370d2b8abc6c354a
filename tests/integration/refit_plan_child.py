"""One rank of a vLLM model on CPU, before its build packs anything: what the recorded plan makes, and what the loader makes.

Run as `python -m tests.integration.refit_plan_child FOLDER MEETING RANK RANKS`; prints one line of JSON.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch

from omnifleet.config.services import EngineConfig
from omnifleet_rollout.engine.vllm_launch import set_environment

set_environment(EngineConfig(dtype="float32"))
os.environ["VLLM_DIST_IDENT"] = Path(sys.argv[2]).name  # vLLM's launcher gives all ranks of an engine one

from safetensors.torch import load_file  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.distributed import init_distributed_environment, initialize_model_parallel  # noqa: E402
from vllm.engine.arg_utils import EngineArgs  # noqa: E402
from vllm.model_executor.model_loader.utils import initialize_model  # noqa: E402

from omnifleet_refit.windows import View  # noqa: E402
from omnifleet_rollout.refit.plan import Plan, record, replay  # noqa: E402
from omnifleet_rollout.refit.proving import agrees, state_digests  # noqa: E402


def alone(plan: Plan, sources: dict[str, torch.Tensor]) -> dict[tuple[str, View], torch.Tensor]:
    """What a rank is sent that takes its own slices and nothing else."""
    return {
        (name, view): view.on(sources[name].contiguous()).clone(memory_format=torch.contiguous_format)
        for name, views in plan.needs().items()
        for view in views
    }


def main(folder: str, meeting: str, rank: int, ranks: int) -> None:
    arguments = EngineArgs(
        model=folder, dtype="float32", max_model_len=256, enforce_eager=True, skip_tokenizer_init=True
    )
    config = arguments.create_engine_config()
    sources = load_file(Path(folder) / "model.safetensors")
    table = {name: (t.dtype, list(t.shape)) for name, t in sources.items()}
    with set_current_vllm_config(config):
        init_distributed_environment(ranks, rank, f"file://{meeting}", rank, "gloo")
        initialize_model_parallel(ranks)
        with torch.device("cpu"):
            model = initialize_model(config)
        before = state_digests(model)
        plan = record(model, model.load_weights, table, f"test rank {rank}")
        moved = [name for name, digest in state_digests(model).items() if before[name] != digest]
        with torch.no_grad():
            model.load_weights(iter(sources.items()))
            loaded = state_digests(model)
            for parameter in model.parameters():
                parameter.fill_(7)
            replay(plan.bind(model, sources))
        replayed = state_digests(model)
        new = {name: torch.randn_like(t) for name, t in sources.items()}
        checked = agrees(model, plan, new, lambda: model.load_weights(iter(new.items())))
        with torch.no_grad():
            model.load_weights(iter(new.items()))
            loaded_new = state_digests(model)
            for parameter in model.parameters():
                parameter.fill_(7)
            replay(plan.bind_pieces(model, alone(plan, new)))
        missing = [name for name, digest in state_digests(model).items() if loaded_new[name] != digest]
    targets = {move.target for move in plan.moves}
    print("RESULT " + json.dumps({
        "moved": moved,
        "different": [name for name in loaded if loaded[name] != replayed[name]],
        "checked": checked,
        "moves": len(plan.moves),
        "fused": sorted(t for t in targets if "qkv" in t or "gate_up_proj" in t),
        "stacked": sorted(t for t in targets if "w13" in t or "w2" in t),
        "unread": list(plan.unread),
        "untouched": list(plan.untouched),
        "sources": len(sources),
        "missing": missing,
        "share": plan.share,
    }))  # fmt: skip


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
