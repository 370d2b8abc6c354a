"""Qwen2.5-VL and Qwen3-VL of Megatron Bridge 0.6.2.

Bridge's own forward takes pixels for every reference, and takes a media token that the model wrote itself for a
picture. Here its parts run one by one: embedding, vision tower, positions by transformers' rule, decoder. Padding is on
the right, so the causal mask alone keeps it from what counts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from omnifleet_trainer.batch.collate import TEXT, MediaContract, MicroBatch
from omnifleet_trainer.policy.families.port import Layout
from omnifleet_trainer.policy.families.qwen import media_contract, patch_values, positions, scattered
from omnifleet_trainer.policy.megatron_sequence import Division
from omnifleet_trainer.policy.packing import Packing


class MegatronQwen25VL:
    """`Family` over Bridge's Qwen2.5-VL, whose tower is that of transformers. config: of transformers."""

    division: Division
    """How packs lie on ranks; set once it is known."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model = model
        self.contract: MediaContract | None = media_contract(config)
        self._rope, self._vision = _rope(config), config.vision_config

    @property
    def patch_values(self) -> int:
        """See `Family`."""
        return patch_values(self._vision)

    def text(self, micro: MicroBatch, embeds: Tensor | None = None) -> dict[str, Any]:
        """See `Family`."""
        return _decoder(self.embed(micro.input_ids) if embeds is None else embeds, _counted(micro))

    def embed(self, ids: Tensor) -> Tensor:
        """See `Family`."""
        embeds: Tensor = self._model.language_model.embedding(input_ids=ids, position_ids=None)
        return embeds.transpose(0, 1)

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`; W = H."""
        return torch.cat(list(self._model.get_image_features(pixels, grids, return_dict=True).pooler_output))

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        return _decoder(scattered(micro, embeds, features), positions(self._rope, micro, layout))

    def received(self, micro: MicroBatch, layout: Layout) -> dict[str, Any]:
        """Arguments of a stage that gets hidden states from the one before it."""
        places = positions(self._rope, micro, layout) if micro.media else _counted(micro)
        return {"decoder_input": None, "position_ids": places}

    @property
    def head(self) -> Any:
        """What makes logits of hidden states; see `heading`."""
        return self._model.language_model.output_layer

    def logits(self, arguments: dict[str, Any]) -> Tensor:
        """[B, S, V] of the positions that reach the head; of a stage before the last its hidden states, [S, B, H]."""
        embeds = arguments["decoder_input"]
        if embeds is not None:
            embeds = self.division.between(embeds)
        return self._decoded(arguments | {"decoder_input": embeds} | self._features(arguments, None))

    def _decoded(self, arguments: dict[str, Any]) -> Tensor:
        logits: Tensor = self._model.language_model(**{"input_ids": None, "attention_mask": None} | arguments)
        return logits

    def packed_logits(self, arguments: dict[str, Any], packing: Packing) -> Tensor:
        """[1, T, V] of the same arguments, packed: this rank's positions that reach the head. Hidden states are [T, 1, H]."""
        division, embeds = self.division, arguments["decoder_input"]
        if embeds is not None:
            packed = division.part(packing.packed(embeds.transpose(0, 1)))
            embeds = division.between(packed.transpose(0, 1).contiguous())
        places = torch.stack([division.part(packing.packed(axis)) for axis in arguments["position_ids"]])
        return self._decoded(
            {
                "decoder_input": embeds,
                "position_ids": places,
                "attention_mask": division.mask(packing),
                "packed_seq_params": division.parameters(packing),
            }
            | self._features(arguments, packing)
        )

    def hidden(self, arguments: dict[str, Any], packing: Packing | None) -> Tensor:
        """What a stage before the last sends on. It must be contiguous: NCCL would send a transposed one as it lies."""
        sent = self.logits(arguments) if packing is None else self.packed_logits(arguments, packing)
        return sent.contiguous()

    def _features(self, arguments: dict[str, Any], packing: Packing | None) -> dict[str, Any]:
        """What inner layers are fed, of this rank's tokens."""
        return {}


class MegatronQwen3VL(MegatronQwen25VL):
    """`Family` over Bridge's Qwen3-VL, whose tower is Megatron's own. W = H x (1 + number of inner layers)."""

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`."""
        last, inner = self._model.vision_model(hidden_states=pixels, grid_thw=grids)
        return torch.cat([last, *inner], dim=-1)

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        last, *inner = torch.split(features, embeds.shape[-1], dim=-1)
        return super().mixed(micro, embeds, last, layout) | {
            "visual_pos_masks": micro.token_types != TEXT,
            "deepstack_visual_embeds": inner,
        }

    def _features(self, arguments: dict[str, Any], packing: Packing | None) -> dict[str, Any]:
        if "visual_pos_masks" not in arguments:
            return {}
        marks = arguments["visual_pos_masks"]
        marks = marks if packing is None else packing.packed(marks)
        marks, inner = self.division.features(marks, arguments["deepstack_visual_embeds"])  # in prompt order
        return {"visual_pos_masks": marks, "deepstack_visual_embeds": inner}


MEGATRON_FAMILIES: dict[str, type[MegatronQwen25VL]] = {
    "qwen2_5_vl": MegatronQwen25VL,
    "qwen3_vl": MegatronQwen3VL,
    "qwen3_vl_moe": MegatronQwen3VL,
}
"""By model_type of the checkpoint's config."""


def _decoder(embeds: Tensor, places: Tensor) -> dict[str, Any]:
    return _embedded(embeds) | {"position_ids": places}


def _embedded(embeds: Tensor) -> dict[str, Any]:
    return {"decoder_input": embeds.transpose(0, 1).contiguous()}


def _counted(micro: MicroBatch) -> Tensor:
    """[3, B, S] positions of text alone."""
    return torch.arange(micro.input_ids.shape[1], device=micro.input_ids.device).expand(
        3, *micro.input_ids.shape
    )


def _rope(config: Any) -> Any:
    """What counts positions, apart from any model: transformers' functions over its config."""
    from transformers import Qwen2_5_VLModel, Qwen3VLModel

    source = (
        Qwen2_5_VLModel if config.model_type == "qwen2_5_vl" else Qwen3VLModel
    )  # the mixture counts as the dense
    taken = {name: getattr(source, name) for name in ("get_rope_index", "get_vision_position_ids")}
    return type("Rope", (), {"config": config, **taken})()
