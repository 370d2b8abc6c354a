"""The small model of refits: its tensors at every step, and what a worker must hold after each.

Its loader fuses, slices, stacks, casts and pads as engines' loaders do, so that what is committed went through a recorded
plan or through the loader, and its parameters can be compared byte for byte with a fresh module's.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

HIDDEN = 8
Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """Rank `rank` of `ranks`: QKV fused and sliced, an expert stack turned, an embedding with padding; of several, a cast."""

    def __init__(self, rank: int = 0, ranks: int = 2) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        norm = torch.float32 if ranks == 1 else torch.bfloat16
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN), requires_grad=False)
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN // ranks, HIDDEN), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(3, HIDDEN, HIDDEN), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=norm), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        share = HIDDEN // self.ranks
        for name, w in weights:
            if name in ("q", "k", "v"):
                mine = w.narrow(0, self.rank * share, share)
                self.qkv.data.narrow(0, "qkv".index(name) * share, share).copy_(mine)
            elif name.startswith("expert."):
                self.experts.data[int(name[7:])].copy_(w.t())
            elif name == "embed":
                self.embed[: len(w)].data.copy_(w)
                self.embed[len(w) :].data.fill_(0)
            else:
                self.norm.data.copy_(w)


def tensors(step: int) -> Tensors:
    """All source tensors of a version; the embedding and expert 0 never change."""

    def of(name: str, *shape: int) -> torch.Tensor:
        frozen = name in ("embed", "expert.0")
        seed = sum(name.encode()) * 1000 + (0 if frozen else step)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    square = (HIDDEN, HIDDEN)
    shapes = {"embed": (13, HIDDEN), "q": square, "k": square, "v": square, "norm": (HIDDEN,)}
    shapes |= {f"expert.{i}": square for i in range(3)}
    return {name: of(name, *shape) for name, shape in shapes.items()}


MOVES = {"q", "k", "v", "norm", "expert.1", "expert.2"}


def expected(step: int, rank: int = 0, ranks: int = 2) -> Tensors:
    """The oracle: parameters of a fresh module that loads the version's tensors through its own loader."""
    return loaded(tensors(step), rank, ranks)


def loaded(weights: Tensors, rank: int = 0, ranks: int = 2) -> Tensors:
    """Parameters of a fresh module that loads these tensors through its own loader."""
    fresh = Small(rank, ranks)
    fresh.load_weights(weights.items())
    return dict(fresh.state_dict())


def scores(parameters: Tensors, token_ids: Sequence[int]) -> list[float]:
    """What stands for logprobs of tokens: each a function of one row of the fused layer."""
    rows = parameters["qkv"]
    return [-float(rows[token % len(rows)].abs().sum()) for token in token_ids]


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint of step -1."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(-1), folder / "model.safetensors")
    return folder
