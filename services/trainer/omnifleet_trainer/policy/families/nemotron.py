"""Nemotron 3 Nano Omni of transformers 5.18: Mamba-2, attention and MLP or expert layers under a RADIO tower.

Its pictures are patches, its clips whole tiles of frames, of which each two (or what the config says) make a patch with a
projection of its own. Both go through the tower's layers in one run. In prompts a clip's features stand at picture
tokens, between words that say the times of its frames; those words are text to this side. Sounds go through an encoder of
their own, a Parakeet with a projector, piece by piece as the engine cuts them. vLLM
may prune a clip's tokens; it is told not to, and nothing is pruned here.

Mamba layers are computed by transformers' own torch functions, in chunks, where `mamba_ssm` and `causal_conv1d` are not
installed: always on a CPU.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from omnifleet.errors import invalid
from omnifleet.sounds import features_heard
from omnifleet_trainer.batch.collate import MediaContract, MicroBatch, grid_of, is_clip, patches_of
from omnifleet_trainer.batch.samples import Segment
from omnifleet_trainer.compat.mamba import scan_in_float32
from omnifleet_trainer.policy.families.port import Layout
from omnifleet_trainer.policy.families.qwen import TextModel, scattered

_NO_LIMIT = (0.0, float("inf"))
"""Of a Mamba layer's steps in time, as in vLLM, Megatron and AutoModel's own class. transformers takes `time_step_min`, which
is meant for first weights, for their least: trained layers have shorter ones."""
_PICTURE = 0
"""Moments that the grid of a picture has here; a clip may have one."""


class NemotronOmni(TextModel):
    """See above."""

    tower = ("vision_model.", "vision_final_layernorm.", "multi_modal_projector.")
    sound_encoder = ("audio_tower.", "embed_audio.")
    encoder = (*tower, *sound_encoder)
    fixed = {"*.layer_scale[12].lambda1": 1.0, "*.num_batches_tracked": 0.0}  # noqa: RUF012
    passive = ("*.input_conditioner.norm_*", "*.feature_extractor.*")  # of media, which come prepared

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        config = model.config
        self._frames, self._patch = config.video_temporal_patch_size, config.vision_config.patch_size
        self.contract = media_contract(config)
        scan_in_float32()
        if self.contract.hears is not None:
            statistics_in_float32(model.audio_tower)
        for module in model.modules():
            if type(module).__name__ == "NemotronHTopkRouter":
                module.forward = _in_float32(module.forward)
            if type(module).__name__ == "NemotronHMamba2Mixer":
                module.time_step_limit = _NO_LIMIT

    @property
    def body(self) -> Any:
        """See `TextModel`."""
        return self._model.language_model.model

    @property
    def patch_values(self) -> int:
        """Of a clip; those of a picture are fewer, and filled up with zeros."""
        return int(3 * self._frames * self._patch**2)

    def arranged(self, segments: Sequence[Segment]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """See `Arranging`, and `arranged` below."""
        return arranged(segments, self._frames, self.patch_values)

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`; W = H. Both kinds' projections have a gradient, if one of 0, whatever the media are: ranks that hold
        the tower together add up the same weights."""
        tower = self._model.vision_model
        kinds = (tower.embeddings.patch_projection, tower.embeddings.video_patch_projection)
        items = [(t, h, w) for t, h, w in grids.tolist()]
        rows = [max(t, 1) * h * w for t, h, w in items]
        patches = torch.split(pixels.to(kinds[0].weight.dtype), rows)
        embedded = [self._embedded(*one) for one in zip(patches, items, strict=True)]
        hidden = torch.cat([one.flatten(0, 1) for one in embedded]) + sum(0 * k.weight.sum() for k in kinds)
        lengths = [one.shape[1] for one in embedded for _ in range(len(one))]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=hidden.device)
        several = {"cu_seqlens": bounds} if len(lengths) > 1 else {}
        hidden = tower.encoder(hidden[None], **several).last_hidden_state[0]
        pieces = torch.split(hidden, [one.shape[0] * one.shape[1] for one in embedded])
        joined = [self._joined(*one) for one in zip(pieces, items, strict=True)]
        features: Tensor = self._model.multi_modal_projector(torch.cat(joined))
        return features

    def encode_sounds(self, features: Tensor, mask: Tensor) -> Tensor:
        """See `Hearing`; W = H. transformers' own function gives a piece of a multiple of 8 frames a feature more."""
        model, contract = self._model, self.contract
        assert contract is not None and contract.hears is not None
        dtype = model.embed_audio.linear_1.weight.dtype
        hidden = model.audio_tower(input_features=features.to(dtype), attention_mask=mask).last_hidden_state
        projected: Tensor = model.embed_audio(heard(hidden, mask, contract.hears))
        return projected

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        return self.text(micro, scattered(micro, embeds, features))

    def _embedded(self, patches: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """[moments, class and register tokens + h w, tower's width] of one medium."""
        places, side = self._model.vision_model.embeddings, self._patch
        t, h, w = grid
        if t == _PICTURE:
            embedded: Tensor = places(patches[:, : 3 * side**2], torch.tensor([[h, w]]))
        else:
            pixels = patches.view(t, h, w, -1, side, side).permute(0, 3, 1, 4, 2, 5)
            embedded = places(pixels.reshape(t, -1, h * side, w * side))
        return embedded

    def _joined(self, hidden: Tensor, grid: tuple[int, int, int]) -> Tensor:
        model, (_, h, w) = self._model, grid
        if model.vision_final_layernorm is not None:
            hidden = model.vision_final_layernorm(hidden)
        first = model.vision_model.config.num_summary_tokens
        return joined(hidden, h, w, first, model.config.downsample_ratio)


def media_contract(config: Any) -> MediaContract:
    """How prompts of a Nemotron Omni with this config carry pictures and clips, alike, and sounds."""
    image, hears = config.image_token_id, config.audio_config
    return MediaContract(
        image,
        round(1 / config.downsample_ratio),
        image,
        None if hears is None else config.audio_token_id,
        None if hears is None else hears.to_dict(),
    )


def heard(hidden: Tensor, mask: Tensor, encoder: Mapping[str, Any]) -> Tensor:
    """The encoder's output [pieces, positions, W] -> [features, W]: of each piece what its frames in `mask` make."""
    counts = [features_heard(encoder, frames) for frames in mask.sum(1).tolist()]
    return torch.cat([piece[:count] for piece, count in zip(hidden, counts, strict=True)])


def arranged(
    segments: Sequence[Segment], frames: int, values: int
) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
    """Patches [P, values], a clip's of `frames` frames each, a picture's filled up with zeros; and grids [items, 3] as
    (moments, h, w), 0 moments for a picture.

    Raises OmnifleetError(INVALID_REQUEST) for a clip whose moments are of another number of frames.
    """
    patches, grids = [], []
    for segment in segments:
        ((t, h, w),) = grid_of(segment).tolist()
        if is_clip(segment):
            patches.append(_moments(segment["pixel_values_videos"], (t, h, w), frames))
        else:
            own = patches_of(segment)
            patches.append(np.pad(own, ((0, 0), (0, values - own.shape[1]))))
        grids.append((t if is_clip(segment) else _PICTURE, h, w))
    return np.concatenate(patches), np.array(grids, np.int64)


def statistics_in_float32(encoder: torch.nn.Module) -> None:
    """Have the encoder's batch norms compute in the type of their statistics, float32 also where weights are bfloat16; torch
    takes no such mixture."""
    for norm in encoder.modules():
        if isinstance(norm, torch.nn.BatchNorm1d):
            norm.forward = partial(_normed, norm)  # type: ignore[method-assign]


def _normed(norm: torch.nn.BatchNorm1d, hidden: Tensor) -> Tensor:
    mean, variance = norm.running_mean, norm.running_var
    assert mean is not None and variance is not None
    weight, bias = norm.weight.to(mean.dtype), norm.bias.to(mean.dtype)
    made = F.batch_norm(hidden.to(mean.dtype), mean, variance, weight, bias, eps=norm.eps)
    return made.to(hidden.dtype)


def joined(hidden: Tensor, h: int, w: int, first: int, ratio: float) -> Tensor:
    """The tower's output for one medium, [moments x (first + h w), width] -> [moments h w / 4, 4 width]: without what comes
    first in each moment, each two by two neighbours as one, row by row and each pair's width by width (transformers')."""
    features = hidden.view(-1, first + h * w, hidden.shape[-1])[:, first:]
    side = round(1 / ratio)
    square = features.reshape(len(features), h // side, side, w // side, side, -1)
    return square.permute(0, 1, 3, 2, 4, 5).reshape(len(features) * h * w // side**2, -1)


def _moments(
    tiles: npt.NDArray[np.float32], grid: tuple[int, int, int], frames: int
) -> npt.NDArray[np.float32]:
    """Tiles [F, 3, H, W] -> patches [t h w, frames 3 p p], the last frame repeated to fill the last moment."""
    t, h, w = grid
    if len(tiles) > t * frames or len(tiles) <= (t - 1) * frames:
        raise invalid(
            f"a clip of {len(tiles)} frames in {t} moments; this model's are of {frames}",
            knob="rollout.engine.clips.temporal_patch_size",
        )
    filled = np.concatenate([tiles, np.repeat(tiles[-1:], t * frames - len(tiles), axis=0)])
    high, wide = filled.shape[2] // h, filled.shape[3] // w
    split = filled.reshape(t, frames * 3, h, high, w, wide).transpose(0, 2, 4, 1, 3, 5)
    return np.ascontiguousarray(split).reshape(t * h * w, -1)


def _in_float32(forward: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
    """Which experts a token goes to is decided in float32, as transformers and engines do it, autocast or not."""

    def exact(hidden: Tensor) -> Any:
        with torch.autocast(hidden.device.type, enabled=False):
            return forward(hidden)

    return exact
