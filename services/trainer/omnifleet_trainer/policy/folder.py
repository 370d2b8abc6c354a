"""A policy's weights on disk: a folder that transformers and vLLM load like the checkpoint it came from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from omnifleet_trainer.policy.names import checkpoint_files

SHARD_BYTES = 4 << 30
_PART = "part-"
_KEPT_SUFFIXES = (".json", ".jinja", ".txt", ".model", ".py")


def write_folder(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], source: Path, *, shard_bytes: int = SHARD_BYTES
) -> None:
    """Write safetensors shards of at most `shard_bytes` (one tensor at least), and copy config, tokenizer and
    processor files from `source`."""
    write_shards(folder, tensors, shard_bytes=shard_bytes)
    finish_folder(folder, source)


def write_shards(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], *, rank: int = 0, shard_bytes: int = SHARD_BYTES
) -> None:
    """What one rank writes of a folder; `finish_folder` makes it whole once every rank has."""
    folder.mkdir(parents=True, exist_ok=True)
    for _ in _written(folder, tensors, f"{_PART}{rank:05d}", shard_bytes):
        pass


def finish_folder(folder: Path, source: Path) -> None:
    """Name the shards that ranks have written, write their index, copy config, tokenizer and processor files."""
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _KEPT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
    shards = sorted(folder.glob(f"{_PART}*.safetensors"))
    if len(shards) == 1:
        shards[0].rename(folder / "model.safetensors")
        return
    places: dict[str, str] = {}
    for i, shard in enumerate(shards):
        name = f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors"
        shard.rename(folder / name)
        with safe_open(folder / name, "pt") as stored:
            places |= dict.fromkeys(stored.keys(), name)
    size = sum(path.stat().st_size for path in folder.glob("model-*.safetensors"))
    index = {"metadata": {"total_size": size}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1, sort_keys=True))


def read_folder(folder: Path) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of every tensor of a checkpoint folder, one at a time, on the host."""
    for path in checkpoint_files(folder):
        with safe_open(path, "pt") as stored:
            for name in sorted(stored.keys()):
                yield name, stored.get_tensor(name)


@contextmanager
def stored(files: Iterable[Path]) -> Iterator[Callable[[str], Tensor]]:
    """Inside, the tensors of safetensors files by name, each read when it is asked for. Raises KeyError for another name."""
    with ExitStack() as stack:
        opened = [stack.enter_context(safe_open(path, "pt")) for path in files]
        places = {name: one for one in opened for name in one.keys()}  # noqa: SIM118
        yield lambda name: places[name].get_tensor(name)


def _written(
    folder: Path, tensors: Iterable[tuple[str, Tensor]], stem: str, shard_bytes: int
) -> Iterator[int]:
    """Write shard after shard as the tensors come; yields each shard's size."""
    shard: dict[str, Tensor] = {}
    size = index = 0
    for name, tensor in tensors:
        if shard and size + tensor.nbytes > shard_bytes:
            save_file(shard, folder / f"{stem}-{index:05d}.safetensors", metadata={"format": "pt"})
            yield size
            shard, size, index = {}, 0, index + 1
        shard[name] = tensor.detach().to("cpu", copy=True, memory_format=torch.contiguous_format)
        size += tensor.nbytes
    if shard:
        save_file(shard, folder / f"{stem}-{index:05d}.safetensors", metadata={"format": "pt"})
        yield size
