"""Pictures into a Qwen2-VL family model: the tower runs once per distinct picture, its output goes to every reference.

Public seams of transformers 5.18: `get_image_features`, `get_rope_index`, `inputs_embeds`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest
from omnifleet_trainer.batch.collate import IMAGE, MediaContract, MicroBatch, grid_of
from omnifleet_trainer.batch.samples import Segment

FAMILIES = ("qwen2_vl", "qwen2_5_vl")


def media_contract(config: Any) -> MediaContract | None:
    """How prompts of a model with this transformers config carry pictures; None for a text model.

    Raises OmnifleetError(UNSUPPORTED) for another vision family.
    """
    if getattr(config, "vision_config", None) is None:
        return None
    if config.model_type not in FAMILIES:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"model type {config.model_type} has a vision tower that this backend cannot feed; it knows {', '.join(FAMILIES)}",
            knob="model.path",
        )
    return MediaContract(config.image_token_id, config.vision_config.spatial_merge_size)


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
    references, encoded, cached: pictures referred to, run through the tower, and taken from the cache.
    patches: rows of pixels that were run through the tower.
    """

    def __init__(self, model: Any, contract: MediaContract | None, *, frozen: bool, cache_bytes: int) -> None:
        self._model, self.contract, self.frozen = model, contract, frozen
        self._cache = FeatureCache(cache_bytes if frozen else 0)
        self.references = self.encoded = self.cached = self.patches = 0

    def arguments(self, micro: MicroBatch, segments: Mapping[Digest, Segment]) -> dict[str, Any]:
        """Keyword arguments of the model's forward for a micro-batch that is on the model's device."""
        if not micro.media:
            return {"input_ids": micro.input_ids, "attention_mask": micro.attention_mask}
        embeds = self._model.get_input_embeddings()(micro.input_ids)
        features = self._features(micro.media, segments, micro.input_ids.device)
        pictures = torch.cat([features[key] for key in micro.media]).to(embeds.dtype)
        places = (micro.token_types == IMAGE)[..., None].expand_as(embeds)
        positions, _ = self._model.model.get_rope_index(
            micro.input_ids,
            mm_token_type_ids=micro.token_types,
            image_grid_thw=micro.grids,
            attention_mask=micro.attention_mask,
        )
        return {
            "inputs_embeds": embeds.masked_scatter(places, pictures),
            "attention_mask": micro.attention_mask,
            "position_ids": positions,
        }

    def clear(self) -> None:
        """Forget cached features: after a load, or a move to another device."""
        self._cache.clear()

    def _features(
        self, media: tuple[Digest, ...], segments: Mapping[Digest, Segment], device: torch.device
    ) -> dict[Digest, Tensor]:
        """[features, width] of each distinct picture; one tower call for those not cached, inside autograd."""
        distinct = list(dict.fromkeys(media))
        found = {key: self._cache.get(key) for key in distinct}
        missing = [key for key in distinct if found[key] is None]
        self.references += len(media)
        self.encoded += len(missing)
        self.patches += sum(len(segments[key]["pixel_values"]) for key in missing)
        self.cached += len(distinct) - len(missing)
        ready = {key: features for key, features in found.items() if features is not None}
        if not missing:
            return ready
        pixels = np.concatenate([np.asarray(segments[key]["pixel_values"]) for key in missing])
        grids = [grid_of(segments[key]) for key in missing]
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.frozen):
            output = self._model.get_image_features(
                torch.from_numpy(pixels).to(device),
                torch.from_numpy(np.concatenate(grids)).to(device),
                return_dict=True,
            )
        pieces = iter(output.pooler_output)
        for key, grid in zip(missing, grids, strict=True):
            ready[key] = torch.cat([next(pieces) for _ in grid])
            if self.frozen:
                self._cache.put(key, ready[key])
        return ready
