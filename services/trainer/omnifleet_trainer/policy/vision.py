"""Media into a model: the tower runs once per distinct picture or clip, its output goes to every reference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.types import Digest
from omnifleet_trainer.batch.collate import MicroBatch, grid_of, is_clip
from omnifleet_trainer.batch.samples import Segment
from omnifleet_trainer.policy.families.port import Family, Layout, arranged


class FeatureCache:
    """Encoder outputs by segment key; bounded, least recently used first out. Only for a tower that never changes."""

    def __init__(self, limit_bytes: int) -> None:
        self._limit, self._bytes = limit_bytes, 0
        self._features: OrderedDict[Digest, Tensor] = OrderedDict()

    def get(self, key: Digest) -> Tensor | None:
        """The features, or None."""
        found = self._features.get(key)
        if found is not None:
            self._features.move_to_end(key)
        return found

    def put(self, key: Digest, features: Tensor) -> None:
        """Keep features; a view of a larger tensor is copied, so that the rest of it is freed."""
        kept = features.detach().clone()
        previous = self._features.pop(key, None)
        self._bytes += kept.nbytes - (0 if previous is None else previous.nbytes)
        self._features[key] = kept
        while self._bytes > self._limit and self._features:
            self._bytes -= self._features.popitem(last=False)[1].nbytes

    def clear(self) -> None:
        """Drop everything."""
        self._features.clear()
        self._bytes = 0


class Vision:
    """Builds the forward arguments of a micro-batch, and counts what the tower did.

    cache_bytes: bound of cached features; used only while `frozen` (no weight of the tower trains).
    references, encoded, cached: media referred to, run through the tower, and taken from the cache.
    patches: rows of pixels that were run through the tower.
    anywhere: of a tower whose weights are spread over ranks, which run it together or not at all: whether any of them
    is about to; a rank without media then runs it on a blank picture, which changes no value and no gradient.
    """

    def __init__(
        self,
        family: Family,
        *,
        frozen: bool,
        cache_bytes: int = 1 << 30,
        anywhere: Callable[[bool], bool] | None = None,
    ) -> None:
        self._family, self.contract, self.frozen = family, family.contract, frozen
        self._anywhere = anywhere if self.contract is not None else None
        self._cache = FeatureCache(cache_bytes if frozen else 0)
        self.references = self.encoded = self.cached = self.patches = 0

    def arguments(self, micro: MicroBatch, segments: Mapping[Digest, Segment]) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a micro-batch that is on the model's device."""
        device = micro.input_ids.device
        encodes = any(self._cache.get(key) is None for key in micro.media)
        joins = self._joins(encodes)
        if not micro.media and not joins:
            return self._family.text(micro)
        embeds = self._family.embed(micro.input_ids)  # before the tower, on every rank
        if joins:
            embeds = embeds + self._blank(device)
        if not micro.media:
            return self._family.text(micro, embeds)
        features = self._features(micro.media, segments, device)
        ordered = torch.cat([features[key] for key in micro.media])
        layout = layout_of([segments[key] for key in micro.media], device)
        return self._family.mixed(micro, embeds, ordered, layout)

    def clear(self) -> None:
        """Forget cached features: after a load, or a move to another device."""
        self._cache.clear()

    def _joins(self, encodes: bool) -> bool:
        """Whether the tower runs here for the sake of other ranks alone."""
        return self._anywhere is not None and self._anywhere(encodes) and not encodes

    def _blank(self, device: torch.device) -> Tensor:
        """0, by way of every weight of the tower."""
        assert self.contract is not None
        side = self.contract.merge
        pixels = torch.zeros((side * side, self._family.patch_values), device=device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded = self._family.encode(pixels, torch.tensor([[1, side, side]], device=device))
        return encoded.sum() * 0

    def _features(
        self, media: tuple[Digest, ...], segments: Mapping[Digest, Segment], device: torch.device
    ) -> dict[Digest, Tensor]:
        """[features, W] of each distinct medium; one tower call for those not cached, inside autograd."""
        distinct = list(dict.fromkeys(media))
        found = {key: self._cache.get(key) for key in distinct}
        missing = [key for key in distinct if found[key] is None]
        self.references += len(media)
        self.encoded += len(missing)
        self.cached += len(distinct) - len(missing)
        ready = {key: features for key, features in found.items() if features is not None}
        if not missing:
            return ready
        pixels, grids = (
            torch.from_numpy(a).to(device) for a in arranged(self._family, [segments[k] for k in missing])
        )
        self.patches += len(pixels)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            encoded = self._family.encode(pixels, grids)
        assert self.contract is not None
        sizes = [int(grid_of(segments[key]).prod(-1).sum()) // self.contract.merge**2 for key in missing]
        for key, piece in zip(missing, torch.split(encoded, sizes), strict=True):
            ready[key] = piece
            if self.frozen:
                self._cache.put(key, piece)
        return ready


def layout_of(segments: Sequence[Segment], device: torch.device) -> Layout:
    """Grids of the pictures and of the clips among `segments`, in their order.

    A clip's seconds between temporal patches are its `second_per_grid_ts`; 1 where a processor gives none.
    """
    grids: dict[bool, list[npt.NDArray[np.int64]]] = {False: [], True: []}
    seconds: list[float] = []
    for segment in segments:
        grid = grid_of(segment)
        grids[is_clip(segment)].append(grid)
        if is_clip(segment):
            given = np.asarray(segment.get("second_per_grid_ts", np.ones(len(grid)))).reshape(-1)
            seconds += [float(value) for value in given]
    pictures, clips = (
        torch.from_numpy(np.concatenate([np.zeros((0, 3), np.int64), *grids[kind]])).to(device)
        for kind in (False, True)
    )
    return Layout(pictures, clips, seconds)
