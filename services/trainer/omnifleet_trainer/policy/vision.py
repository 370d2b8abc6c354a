"""Media into a model: each encoder runs once per distinct picture, clip or sound, its output goes to every reference."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.types import Digest
from omnifleet_trainer.batch.collate import MicroBatch, features_of, grid_of, is_clip, is_sound
from omnifleet_trainer.batch.samples import Segment
from omnifleet_trainer.policy.families.port import Family, Hearing, Layout, arranged


class FeatureCache:
    """Encoder outputs by segment key; bounded, least recently used first out. Only for encoders that never change."""

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
    """Builds the forward arguments of a micro-batch, and counts what the encoders did: the tower, and that of sounds.

    cache_bytes: bound of cached features; kept only of an encoder that is frozen (no weight of it trains).
    references, encoded, cached: media referred to, run through an encoder, and taken from the cache.
    patches: rows of pixels that were run through the tower.
    anywhere: of encoders whose weights are spread over ranks, which run each together or not at all: whether any of them
    is about to; a rank without such media then runs it on a blank one, which changes no value and no gradient.
    """

    def __init__(
        self,
        family: Family,
        *,
        frozen: bool,
        sounds_frozen: bool = True,
        cache_bytes: int = 1 << 30,
        anywhere: Callable[[bool], bool] | None = None,
    ) -> None:
        self._family, self.contract = family, family.contract
        self._still = {False: frozen, True: sounds_frozen}
        hears = self.contract is not None and self.contract.hears is not None
        self._kinds = (False, True) if hears else (False,)
        """Pictures and clips, then sounds: on every rank in this order."""
        self.frozen = all(self._still[kind] for kind in self._kinds)
        self._anywhere = anywhere if self.contract is not None else None
        self._cache = FeatureCache(cache_bytes if frozen or sounds_frozen else 0)
        self.references = self.encoded = self.cached = self.patches = 0

    def arguments(self, micro: MicroBatch, segments: Mapping[Digest, Segment]) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a micro-batch that is on the model's device."""
        device = micro.input_ids.device
        ready = self._known(micro.media)
        missing: dict[bool, list[Digest]] = {kind: [] for kind in self._kinds}
        for key in dict.fromkeys(micro.media):
            if key not in ready:
                missing[is_sound(segments[key])].append(key)
        joins = [kind for kind in self._kinds if self._joins(bool(missing[kind]))]
        if not micro.media and not joins:
            return self._family.text(micro)
        embeds = self._family.embed(micro.input_ids)  # before the encoders, on every rank
        for kind in self._kinds:
            if missing[kind]:
                ready |= self._encoded(kind, missing[kind], segments, device)
            elif kind in joins:
                embeds = embeds + self._blank(kind, device)
        if not micro.media:
            return self._family.text(micro, embeds)
        ordered = torch.cat([ready[key] for key in micro.media])
        seen = [segments[key] for key in micro.media if not is_sound(segments[key])]
        return self._family.mixed(micro, embeds, ordered, layout_of(seen, device))

    def clear(self) -> None:
        """Forget cached features: after a load, or a move to another device."""
        self._cache.clear()

    def _joins(self, encodes: bool) -> bool:
        """Whether an encoder runs here for the sake of other ranks alone."""
        return self._anywhere is not None and self._anywhere(encodes) and not encodes

    def _blank(self, sounds: bool, device: torch.device) -> Tensor:
        """0, by way of every weight of an encoder."""
        contract = self.contract
        assert contract is not None
        if sounds:
            assert contract.hears is not None
            frames = 2 * int(contract.hears["subsampling_factor"])
            features = torch.zeros((1, frames, int(contract.hears["num_mel_bins"])), device=device)
            inputs = (features, torch.ones((1, frames), dtype=torch.bool, device=device))
        else:
            side = contract.merge
            pixels = torch.zeros((side * side, self._family.patch_values), device=device)
            inputs = (pixels, torch.tensor([[1, side, side]], device=device))
        return self._run(sounds, *inputs).sum() * 0

    def _known(self, media: tuple[Digest, ...]) -> dict[Digest, Tensor]:
        """What is cached of these media; counts them all."""
        distinct = list(dict.fromkeys(media))
        found = {key: self._cache.get(key) for key in distinct}
        ready = {key: features for key, features in found.items() if features is not None}
        self.references += len(media)
        self.encoded += len(distinct) - len(ready)
        self.cached += len(ready)
        return ready

    def _encoded(
        self, sounds: bool, keys: list[Digest], segments: Mapping[Digest, Segment], device: torch.device
    ) -> dict[Digest, Tensor]:
        """[features, W] of each of these media: one call of their encoder, inside autograd."""
        given = [segments[key] for key in keys]
        arrays = stacked(given) if sounds else arranged(self._family, given)
        first, second = (torch.from_numpy(array).to(device) for array in arrays)
        if not sounds:
            self.patches += len(first)
        encoded = self._run(sounds, first, second)
        assert self.contract is not None
        sizes = [features_of(segment, self.contract) for segment in given]
        made = dict(zip(keys, torch.split(encoded, sizes), strict=True))
        for key, piece in made.items() if self._still[sounds] else ():
            self._cache.put(key, piece)
        return made

    def _run(self, sounds: bool, first: Tensor, second: Tensor) -> Tensor:
        family = self._family
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self._still[sounds]):
            if sounds:
                assert isinstance(family, Hearing)
                return family.encode_sounds(first, second)
            return family.encode(first, second)


def stacked(segments: Sequence[Segment]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.bool_]]:
    """Mel features [pieces, frames, bands] and mask [pieces, frames] of sounds, piece after piece, as long as the longest."""
    longest = max(segment["input_features"].shape[1] for segment in segments)

    def long(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        ends = [(0, longest - array.shape[1] if axis == 1 else 0) for axis in range(array.ndim)]
        return np.pad(array, ends)

    features = np.concatenate([long(segment["input_features"]) for segment in segments])
    return features, np.concatenate([long(segment["input_features_mask"]) for segment in segments])


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
