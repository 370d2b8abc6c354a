"""What `Vision` asks of a family, whatever library holds the model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt
from torch import Tensor

from omnifleet_trainer.batch.collate import MediaContract, MicroBatch, grid_of, patches_of
from omnifleet_trainer.batch.samples import Segment


@dataclass(frozen=True, slots=True)
class Layout:
    """Media of a micro-batch, by kind, in prompt order.

    pictures, clips: [items, 3] int64 patches (t, h, w). seconds: of each clip, between two temporal patches.
    """

    pictures: Tensor
    clips: Tensor
    seconds: Sequence[float]


class Family(Protocol):
    """One model, seen through its family. B samples, S positions, H wide."""

    contract: MediaContract | None
    """How prompts carry media; None for a model that takes none."""

    @property
    def patch_values(self) -> int:
        """C: values of one patch."""
        ...

    def text(self, micro: MicroBatch, embeds: Tensor | None = None) -> dict[str, Any]:
        """Forward arguments of a micro-batch without media. embeds: of its ids, if they are there already."""
        ...

    def embed(self, ids: Tensor) -> Tensor:
        """[B, S] int64 ids -> [B, S, H] embeddings."""
        ...

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """One run of the tower: patches [P, C], grids [items, 3] -> [features, W], item after item.

        W is H, or a multiple where the family hands features to inner layers too.
        """
        ...

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """Forward arguments of a micro-batch with media; features [features, W] in prompt order."""
        ...


@runtime_checkable
class Hearing(Protocol):
    """A family with an encoder of sounds beside its tower."""

    def encode_sounds(self, features: Tensor, mask: Tensor) -> Tensor:
        """One run of it: mel features [pieces, frames, bands], mask bool [pieces, frames] -> [features, W], piece after
        piece."""
        ...


@runtime_checkable
class Arranging(Protocol):
    """A family whose segments are not patches and grids already."""

    def arranged(self, segments: Sequence[Segment]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """What `encode` takes of these media: patches [P, C] and a row of grids for each."""
        ...


def arranged(
    family: Family, segments: Sequence[Segment]
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """What `encode` takes of these media: patches [P, C] and grids [items, 3], item after item."""
    if isinstance(family, Arranging):
        return family.arranged(segments)
    patches = np.concatenate([patches_of(segment) for segment in segments])
    return patches, np.concatenate([grid_of(segment) for segment in segments])
