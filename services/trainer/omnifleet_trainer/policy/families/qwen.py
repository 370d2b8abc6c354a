"""Qwen2-VL, Qwen2.5-VL and Qwen3-VL of transformers 5.18, by public seams: `get_image_features`, `get_rope_index`,
`inputs_embeds`, and the language model's `deepstack_visual_embeds`.

The towers treat a clip as a picture with more temporal patches, so one run takes both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.collate import TEXT, MediaContract, MicroBatch
from omnifleet_trainer.policy.families.port import Layout
from omnifleet_trainer.policy.sharded import plain_forward


class TextModel:
    """A model without media, and what all families of transformers share. body: the model without its head."""

    contract: MediaContract | None = None
    encoder: tuple[str, ...] = ("model.visual.", "visual.")
    """Prefixes of the weights that features of media depend on, in the model."""
    sound_encoder: tuple[str, ...] = ()
    """Those of `encoder` that features of sounds alone depend on."""
    fixed: Mapping[str, float] = {}
    """Patterns of the model's weights that no checkpoint holds, and their value; they never train."""
    passive: tuple[str, ...] = ()
    """Patterns of a checkpoint's tensors that no model holds; they are handed on as they are."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def body(self) -> Any:
        """Takes the forward arguments; its output has last_hidden_state [B, S, H]."""
        return self._model.model

    @property
    def patch_values(self) -> int:
        """See `Family`."""
        vision = self._model.config.vision_config
        return patch_values(vision)

    def logits(self, arguments: dict[str, Any], wanted: Tensor) -> Tensor:
        """[B, len(wanted), V] at positions `wanted`. By the class's forward: the model's own may be `entered`."""
        logits: Tensor = plain_forward(
            self._model, **arguments, logits_to_keep=wanted, use_cache=False
        ).logits
        return logits

    def text(self, micro: MicroBatch, embeds: Tensor | None = None) -> dict[str, Any]:
        """See `Family`."""
        if embeds is not None:
            return {"inputs_embeds": embeds, "attention_mask": micro.attention_mask}
        return {"input_ids": micro.input_ids, "attention_mask": micro.attention_mask}

    def embed(self, ids: Tensor) -> Tensor:
        """See `Family`."""
        embeds: Tensor = self._model.get_input_embeddings()(ids)
        return embeds

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """Never asked for: `collate` refuses media for a model without a contract."""
        raise AssertionError("a text model has no tower")

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """As `encode`."""
        raise AssertionError("a text model takes no features")


class Qwen2VL(TextModel):
    """Qwen2-VL and Qwen2.5-VL. In the latter a clip's positions go by seconds."""

    def __init__(self, model: Any) -> None:
        super().__init__(model)
        self.contract = media_contract(model.config)

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`; W = H."""
        return torch.cat(list(self._model.get_image_features(pixels, grids, return_dict=True).pooler_output))

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        return {
            "inputs_embeds": scattered(micro, embeds, features),
            "attention_mask": micro.attention_mask,
            "position_ids": positions(self._model.model, micro, layout),
        }


class Qwen3VL(Qwen2VL):
    """Qwen3-VL, dense or a mixture: the tower also gives features of inner layers, which the first language layers add.

    W = H x (1 + number of inner layers). The whole model's forward makes those arguments itself, from pixels; its
    language model takes them, so that is what runs here.
    """

    @property
    def body(self) -> Any:
        """See `TextModel`."""
        return self._model.model.language_model

    def logits(self, arguments: dict[str, Any], wanted: Tensor) -> Tensor:
        """See `TextModel`."""
        hidden = self.body(**arguments, use_cache=False).last_hidden_state
        logits: Tensor = self._model.get_output_embeddings()(hidden[:, wanted])
        return logits

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`."""
        output = self._model.get_image_features(pixels, grids, return_dict=True)
        layers = [torch.cat(list(layer)) for layer in output.deepstack_features]
        return torch.cat([torch.cat(list(output.pooler_output)), *layers], dim=-1)

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        last, *inner = torch.split(features, embeds.shape[-1], dim=-1)
        return super().mixed(micro, embeds, last, layout) | {
            "visual_pos_masks": micro.token_types != TEXT,
            "deepstack_visual_embeds": inner,
        }


def unknown_family(model_type: str, backend: str, known: Any) -> OmnifleetError:
    """A refusal that names what is known."""
    return OmnifleetError(
        Reason.UNSUPPORTED,
        f"the {backend} backend cannot feed the vision tower of model type {model_type}; it knows {', '.join(known)}",
        knob="model.path",
    )


def patch_values(vision: Any) -> int:
    """Values of one patch of a Qwen tower."""
    return int(vision.in_channels * vision.temporal_patch_size * vision.patch_size**2)


def media_contract(config: Any) -> MediaContract:
    """How prompts of a Qwen model with this config carry pictures and clips."""
    return MediaContract(
        config.image_token_id, config.vision_config.spatial_merge_size, config.video_token_id
    )


def scattered(micro: MicroBatch, embeds: Tensor, features: Tensor) -> Tensor:
    """[B, S, H] embeddings with features [features, H] in the media's places."""
    places = (micro.token_types != TEXT)[..., None].expand_as(embeds)
    return embeds.masked_scatter(places, features.to(embeds.dtype))


def positions(model: Any, micro: MicroBatch, layout: Layout) -> Tensor:
    """[3, B, S] positions (time, row, column) by the model's own `get_rope_index`."""
    found: Tensor = model.get_rope_index(
        micro.input_ids,
        mm_token_type_ids=micro.token_types,
        image_grid_thw=layout.pictures,
        video_grid_thw=layout.clips if len(layout.clips) else None,
        second_per_grid_ts=list(layout.seconds),
        attention_mask=micro.attention_mask,
    )[0]
    return found
