"""What a policy's step costs: media encoded once or for every reference, packed or padded, one backend or the other.

`python bench/policy/unique_media.py` (minutes, one core); `--device cuda` (one GPU, a random model of 2 B; `--dtype bfloat16`).
`--only`, `--groups` and `--backend` pick; `--side N` makes pictures of N x N patches, `--recompute` makes room for them;
`--decoder 0.5B` puts the decoder of a 0.5 B model behind the same tower. Both sides of a ratio run in one process. `naive` gives
every reference a key of its own, so that its medium is encoded for it alone; all else is the same code. Memory: on a GPU the peak
of allocated bytes above what was held; on a CPU the bytes that autograd keeps for the backward pass. Export: bytes of tensors
made whole, a second; no wire.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from omnifleet.address import token_digest
from omnifleet.config.recipe import ObjectiveConfig, OptimizerConfig, TrainerConfig
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample
from omnifleet_trainer.compat.quiet import quiet_libraries
from omnifleet_trainer.policy.group import ALONE
from omnifleet_trainer.policy.job import Job, open_rank
from omnifleet_trainer.tiny.checkpoint import write_checkpoint

SAMPLES = 16
SIZES: dict[str, dict[str, Any]] = {
    "cpu": {
        "hidden": 128,
        "inner": 256,
        "layers": 4,
        "heads": 2,
        "kv": 2,
        "vision": {"depth": 4},
        "side": 16,
        "rounds": 2,
        "budget": 16384,
    },
    "cuda": {
        "hidden": 1536,
        "inner": 8960,
        "layers": 28,
        "heads": 12,
        "kv": 2,
        "vision": {"depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16},
        "side": 40,
        "rounds": 3,
        "budget": 32768,
    },
}
DECODERS: dict[str, dict[str, Any]] = {
    "1.5B": {},
    "0.5B": {"hidden": 896, "inner": 4864, "layers": 24, "heads": 14},
}
"""On a GPU, of which published models (Qwen2.5) the decoder has the widths."""


def write_model(folder: Path, size: dict[str, Any], device: str) -> None:
    """A random Qwen2.5-VL. On a CPU its tower costs as much for a feature as its decoder for a token; on a GPU, where it has the
    widths of the published tower and the decoder of a 2 B model, twice as much. All layers of the tower see the whole picture;
    in the published one all but 4 of 32 see windows."""
    from transformers import AutoConfig, Qwen2_5_VLForConditionalGeneration

    write_checkpoint(folder, hidden=128, layers=1, family="qwen2_5_vl")
    body = json.loads((folder / "config.json").read_text())
    body["text_config"] |= {
        "hidden_size": size["hidden"],
        "intermediate_size": size["inner"],
        "num_hidden_layers": size["layers"],
        "num_attention_heads": size["heads"],
        "num_key_value_heads": size["kv"],
    }
    body["text_config"].pop("layer_types", None)
    half = size["hidden"] // size["heads"] // 2
    body["text_config"]["rope_parameters"]["mrope_section"] = [half // 4, 3 * half // 8, 3 * half // 8]
    body["vision_config"] |= {
        "out_hidden_size": size["hidden"],
        "fullatt_block_indexes": list(
            range(size["vision"]["depth"])
        ),  # windows are a loop of small calls in torch
    } | size["vision"]
    (folder / "config.json").write_text(json.dumps(body))
    config = AutoConfig.from_pretrained(folder)
    with torch.device(device):
        model = Qwen2_5_VLForConditionalGeneration(config)
    tensors = {name: t.detach().cpu().contiguous() for name, t in model.state_dict().items()}
    save_file(
        {_hub_name(name): t for name, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )


def _hub_name(name: str) -> str:
    return name.replace("model.language_model.", "model.").replace("model.visual.", "visual.")


def pictures(folder: Path, *, group: int, side: int, naive: bool) -> StepBatch:
    """SAMPLES replies of 32 tokens in groups of `group`, a picture of side x side patches each; lr 0 changes nothing."""
    config = json.loads((folder / "config.json").read_text())
    random = np.random.default_rng(0)
    segments: dict[Digest, Any] = {}
    samples = []
    for i in range(SAMPLES):
        key = Digest(f"{i // group}" + (f"-{i}" if naive else ""))
        values = 3 * 2 * config["vision_config"]["patch_size"] ** 2
        pixels = np.random.default_rng(i // group).standard_normal((side * side, values)).astype(np.float32)
        segments[key] = {"pixel_values": pixels, "image_grid_thw": np.array([[1, side, side]])}
        prompt = [config["vision_start_token_id"], *[config["image_token_id"]] * (side * side // 4)]
        prompt += [config["vision_end_token_id"], *random.integers(0, 300, 32).tolist()]
        samples.append(sample(i, f"g{i // group}", prompt, 32, random, (key,)))
    return StepBatch(samples, 0, segments)


def most(folder: Path, side: int, group: int, *, frozen: bool, recompute: bool) -> float:
    """By how much a step can get faster when `group` samples share a picture, if every FLOP takes the same time.

    A sample takes T forward in the tower and D in the decoder, twice that backward, and once more
    where layers recompute; a frozen tower has no backward pass.
    Weights count twice a token (or patch), attention 4 n^2 d a layer, half of that where it is causal.
    """
    config = json.loads((folder / "config.json").read_text())
    text, vision = config["text_config"], config["vision_config"]
    patches, tokens = side * side, side * side // 4 + 66
    width, merged = vision["hidden_size"], 4 * vision["hidden_size"]
    layer = 4 * width**2 + 3 * width * vision["intermediate_size"]
    weights = vision["depth"] * layer + 6 * vision["patch_size"] ** 2 * width
    weights += (merged**2 + merged * text["hidden_size"]) / 4  # a feature is four patches
    tower = 2 * weights * patches + 4 * patches**2 * width * vision["depth"]
    width = text["hidden_size"]
    shared = text["num_key_value_heads"] / text["num_attention_heads"]
    layer = (2 + 2 * shared) * width**2 + 3 * width * text["intermediate_size"]
    weights = text["num_hidden_layers"] * layer + width * text["vocab_size"]
    decoder = 2 * weights * tokens + 2 * tokens**2 * width * text["num_hidden_layers"]
    passes = 4 if recompute else 3
    tower, decoder = tower * (1 if frozen else passes), decoder * passes
    return float((tower + decoder) / (tower / group + decoder))


def texts(scale: float) -> StepBatch:
    """Prompts and replies of log-normal lengths."""
    random = np.random.default_rng(0)
    samples = []
    for i in range(64):
        prompt = random.integers(0, 300, int(scale * np.clip(random.lognormal(6.0, 0.8), 60, 1500))).tolist()
        reply = int(scale * np.clip(random.lognormal(5.0, 0.9), 20, 1024))
        samples.append(sample(i, f"g{i // 4}", prompt, reply, random))
    return StepBatch(samples, 0)


def sample(
    i: int, group: str, prompt: list[int], reply: int, random: Any, keys: tuple[Digest, ...] = ()
) -> TrainingSample:
    return TrainingSample(
        trajectory_id=f"{i}",
        group_id=group,
        prompt_token_ids=prompt,
        prompt_hash=token_digest(prompt),
        token_ids=random.integers(0, 300, reply).tolist(),
        generation_logprobs=[-5.0] * reply,
        mask=[1] * reply,
        lag=[0] * reply,
        reward=float(i % 2),
        advantage=1.0 if i % 2 else -1.0,
        media=tuple(MediaRef(MediaKind.IMAGE, Digest("0" * 64)) for _ in keys),
        segment_keys=keys,
    )


@contextlib.contextmanager
def opened(
    folder: Path, args: argparse.Namespace, *, backend: str = "automodel", **changes: Any
) -> Iterator[Any]:
    freeze, cache = changes.pop("freeze", ()), changes.pop("cache", 0)
    trainer = TrainerConfig(
        backend=backend,
        optimizer=OptimizerConfig(lr=0.0),
        micro_batch_tokens=SIZES[args.device]["budget"],
        peak_tflops=args.peak_tflops,
        dtype=args.dtype,
        recompute=args.recompute,
        threads=1 if args.device == "cpu" else None,  # two that spin beside other work say nothing
        **changes,
    )
    policy = open_rank(Job(folder, trainer, ObjectiveConfig(), freeze=freeze), ALONE)
    policy._vision._cache._limit = cache
    try:
        yield policy
    finally:
        policy.close()
        if args.device == "cuda":
            torch.cuda.empty_cache()


def measured(
    policy: Any, batch: StepBatch, args: argparse.Namespace
) -> tuple[float, float, dict[str, float]]:
    """Seconds of a step (median), MiB, metrics of the last."""
    policy.train(batch)
    seconds, metrics = [], {}
    for _ in range(SIZES[args.device]["rounds"]):
        began = time.perf_counter()
        metrics = policy.train(batch)
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), memory(policy, batch, args), metrics


def memory(policy: Any, batch: StepBatch, args: argparse.Namespace) -> float:
    if args.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
        policy.train(batch)
        return (torch.cuda.max_memory_allocated() - held) / 2**20
    kept: dict[int, int] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in policy._trainable.values()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.train(batch)
    return sum(size for pointer, size in kept.items() if pointer not in weights) / 2**20


def media_rows(folder: Path, args: argparse.Namespace) -> None:
    side = args.side or SIZES[args.device]["side"]
    kept = "layers recomputed" if args.recompute else "nothing recomputed"
    print(
        f"\n{SAMPLES} samples, {side * side // 4} features a picture, {args.backend}, {kept}; s and MiB a step"
    )
    line = f"{'tower':>14} {'G':>3} {'naive s':>9} {'unique s':>9} {'x':>6} {'at most':>8}"
    print(line + f" {'naive MiB':>10} {'unique MiB':>11} {'share':>6}")
    for tower in ("trains", "frozen", "frozen, cached"):
        freeze = () if tower == "trains" else ("visual.*",)
        cache = (4 << 30) if tower == "frozen, cached" else 0
        with opened(folder, args, backend=args.backend, freeze=freeze, cache=cache) as policy:
            for group in args.groups:
                policy._vision.clear()
                policy._vision._cache._limit = 0
                slow, wide, _ = measured(policy, pictures(folder, group=group, side=side, naive=True), args)
                policy._vision._cache._limit = cache
                quick, slim, metrics = measured(
                    policy, pictures(folder, group=group, side=side, naive=False), args
                )
                line = f"{tower:>14} {group:>3} {slow:>9.3f} {quick:>9.3f} {slow / quick:>6.2f}"
                bound = most(folder, side, group, frozen=bool(freeze), recompute=args.recompute)
                line += f" {'':>8}" if cache else f" {bound:>8.2f}"
                line += f" {wide:>10.0f} {slim:>11.0f} {slim / wide:>6.2f}"
                print(line + (f"  MFU {metrics['mfu']:.1%}" if "mfu" in metrics else ""), flush=True)


def packing_rows(folder: Path, args: argparse.Namespace) -> None:
    batch = texts(0.25 if args.device == "cpu" else 1.0)
    tokens = sum(one.length for one in batch.samples)
    print(f"\n64 texts, {tokens} tokens; s a step")
    for backend, packing in (("megatron", True), ("megatron", False), ("automodel", None)):
        with opened(folder, args, backend=backend, packing=packing) as policy:
            seconds, mib, _ = measured(policy, batch, args)
            name = f"{backend}, {'packed' if packing else 'padded'}"
            print(
                f"{name:>18} {seconds:>9.3f} s {tokens / seconds:>9.0f} tokens/s {mib:>9.0f} MiB", flush=True
            )


def export_row(folder: Path, args: argparse.Namespace) -> None:
    print("\nexport")
    for backend in ("automodel", "megatron"):
        with opened(folder, args, backend=backend) as policy:
            rates = []
            for _ in range(3):
                began, size = time.perf_counter(), 0
                for _, tensor in policy.export():
                    size += tensor.nbytes
                if args.device == "cuda":
                    torch.cuda.synchronize()
                rates.append(size / (time.perf_counter() - began) / 1e9)
            print(f"{backend:>18} {max(rates):>9.2f} GB/s of {size / 1e6:.0f} MB", flush=True)


def main() -> None:
    quiet_libraries()
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--backend", choices=("automodel", "megatron"), default="automodel")
    parser.add_argument(
        "--peak-tflops",
        type=float,
        default=None,
        help="for MFU; one H200: 989 in bfloat16, 495 in float32 by TF32",
    )
    parser.add_argument(
        "--groups", type=int, nargs="+", default=(1, 4, 16), help="samples that share a picture"
    )
    parser.add_argument("--side", type=int, default=None, help="patches of a picture's side, even")
    parser.add_argument("--decoder", choices=tuple(DECODERS), default="1.5B", help="with --device cuda")
    parser.add_argument("--recompute", action="store_true", help="layers compute again in the backward pass")
    parser.add_argument("--only", choices=("media", "packing", "export"), action="append")
    args = parser.parse_args()
    if args.side is not None and (args.side < 2 or args.side % 2):
        parser.error("--side must be an even number of patches")
    if args.device == "cuda":
        torch.set_float32_matmul_precision("high")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        size = SIZES[args.device] | (DECODERS[args.decoder] if args.device == "cuda" else {})
        write_model(folder, size, args.device)
        parts = {"media": media_rows, "packing": packing_rows, "export": export_row}
        for name in args.only or parts:
            parts[name](folder, args)


if __name__ == "__main__":
    main()
