"""Nemotron 3 Nano Omni of Megatron Bridge 0.6.2: LLaVA of megatron-core over a hybrid stack and a RADIO tower.

Bridge's own forward takes pixels for every reference, pictures of one size or clips, not both. Here its parts run one by one:
embedding, tower, projector, stack. Its rule for joining four neighbouring features takes them from one row; ours is
transformers', two by two.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet_trainer.batch.collate import MediaContract, MicroBatch
from omnifleet_trainer.batch.samples import Segment
from omnifleet_trainer.policy.families.nemotron import (
    arranged,
    heard,
    joined,
    media_contract,
    statistics_in_float32,
)
from omnifleet_trainer.policy.families.port import Layout
from omnifleet_trainer.policy.families.qwen import scattered
from omnifleet_trainer.policy.megatron_sequence import Division
from omnifleet_trainer.policy.packing import Packing


class MegatronNemotron:
    """`Family` over Bridge's Nemotron Omni. config: of transformers."""

    division: Division
    """How micro-batches lie on ranks; set once it is known."""

    def __init__(self, model: Any, config: Any) -> None:
        self._model = model.llava_model
        model.pre_process = model.post_process = True  # one stage; Bridge's class does not say
        self._config = config
        self.contract: MediaContract | None = media_contract(config)
        if self.contract.hears is not None:
            statistics_in_float32(self._model.sound_model)

    @property
    def patch_values(self) -> int:
        """See `Family`; of a clip, pictures are filled up."""
        return int(3 * self._config.video_temporal_patch_size * self._config.vision_config.patch_size**2)

    def arranged(self, segments: Sequence[Segment]) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.int64]]:
        """See `Arranging`; grids [items, 3] as (moments, h, w), 0 moments for a picture."""
        return arranged(segments, self._config.video_temporal_patch_size, self.patch_values)

    def text(self, micro: MicroBatch, embeds: Tensor | None = None) -> dict[str, Any]:
        """See `Family`."""
        return _decoder(self.embed(micro.input_ids) if embeds is None else embeds)

    def embed(self, ids: Tensor) -> Tensor:
        """See `Family`."""
        embeds: Tensor = self._model.language_model.embedding(input_ids=ids, position_ids=None)
        return embeds.transpose(0, 1)

    def encode(self, pixels: Tensor, grids: Tensor) -> Tensor:
        """See `Family`; W = H."""
        from megatron.core.packed_seq_params import PackedSeqParams

        tower, side = self._model.vision_model, self._config.vision_config.patch_size
        single, frames = 3 * side**2, self._config.video_temporal_patch_size
        items = [(t, h, w) for t, h, w in grids.tolist()]
        rows = torch.split(pixels, [max(t, 1) * h * w for t, h, w in items])
        tiles, sizes, counts = [], [], []
        for patches, (t, h, w) in zip(rows, items, strict=True):
            if t:  # it groups frames itself
                patches = patches.view(t, h * w, frames, single).transpose(1, 2).reshape(-1, single)
            tiles.append(patches[:, :single])
            counts.append(max(t * frames, 1))
            sizes += [(h * side, w * side)] * counts[-1]
        lengths = [h * w // side**2 for h, w in sizes]
        bounds = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32, device=pixels.device)
        longest = torch.tensor(max(lengths), dtype=torch.int32, device=pixels.device)
        packed = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        )
        hidden = tower(
            torch.cat(tiles)[None].to(tower.embedder.weight.dtype),
            imgs_sizes=torch.tensor(sizes),
            packed_seq_params=packed,
            num_frames=counts,
        )[0][0]
        first = tower.class_token_len
        pieces = torch.split(hidden, [max(t, 1) * (first + h * w) for t, h, w in items])
        ratio = self._config.downsample_ratio
        features = torch.cat(
            [joined(one, h, w, first, ratio) for one, (_, h, w) in zip(pieces, items, strict=True)]
        )
        projected: Tensor = self._model.vision_projection(features[:, None])[:, 0]
        return projected

    def encode_sounds(self, features: Tensor, mask: Tensor) -> Tensor:
        """See `Hearing`; W = H. The encoder is transformers', whole on each rank."""
        assert self.contract is not None and self.contract.hears is not None
        encoder = self._model.sound_model.encoder
        hidden = encoder(
            input_features=features.to(encoder.subsampling.linear.weight.dtype), attention_mask=mask
        ).last_hidden_state
        kept = heard(hidden, mask, self.contract.hears)
        projected: Tensor = self._model.sound_projection(kept[:, None])[:, 0]
        return projected

    def mixed(self, micro: MicroBatch, embeds: Tensor, features: Tensor, layout: Layout) -> dict[str, Any]:
        """See `Family`."""
        return _decoder(scattered(micro, embeds, features))

    @property
    def head(self) -> Any:
        """What makes logits of hidden states; see `heading`."""
        return self._model.language_model.output_layer

    def logits(self, arguments: dict[str, Any]) -> Tensor:
        """[B, S, V] of the positions that reach the head."""
        logits: Tensor = self._model.language_model(
            input_ids=None,
            position_ids=None,
            attention_mask=None,
            **arguments | {"decoder_input": self.division.between(arguments["decoder_input"])},
        )
        return logits

    def packed_logits(self, arguments: dict[str, Any], packing: Packing) -> Tensor:
        """[1, T, V] of the same arguments, packed, of the positions that reach the head."""
        embeds = packing.packed(arguments["decoder_input"].transpose(0, 1))
        return self.logits(_decoder(embeds) | {"packed_seq_params": packing.parameters()})


def _decoder(embeds: Tensor) -> dict[str, Any]:
    return {"decoder_input": embeds.transpose(0, 1).contiguous()}
