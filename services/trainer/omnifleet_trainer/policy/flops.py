"""Floating-point operations of a step, and the share of the device's peak that they make (MFU).

Source: PaLM (2204.02311), appendix B. Per token a matrix product with N weights costs 2 N forward and 4 N backward;
causal attention over a sequence of n tokens costs 2 n² d forward a layer (d = heads x head size), twice that backward.
Recomputed activations are not counted: MFU is about useful work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet_trainer.batch.samples import StepBatch

_EXPERTS = ("num_experts", "num_local_experts", "n_routed_experts")


@dataclass(frozen=True, slots=True)
class FlopsModel:
    """decoder, tower: weights that one text token, one picture patch is multiplied with; of experts the chosen share.

    trained: share of the decoder's weights that train. attention: layers x heads x head size.
    """

    decoder: float
    tower: float
    trained: float
    attention: float

    @classmethod
    def of(cls, model: Any, encoder: Sequence[str], sounds: Sequence[str] = ()) -> FlopsModel:
        """Of a transformers model; encoder: prefixes of the parameter names of what encodes media. sounds: of them those of
        what encodes sounds, which is left out: it is small, and how often a weight is used goes by its layer."""
        config = getattr(model.config, "text_config", None) or model.config
        experts = next((n for name in _EXPERTS if (n := getattr(config, name, None))), 0)
        chosen = config.num_experts_per_tok / experts if experts else 1.0
        decoder = tower = trained = 0.0
        for name, weight in model.named_parameters():
            if weight.ndim < 2 or "embed_tokens" in name or name.endswith("model.embeddings.weight"):
                continue
            size = weight.numel() * (chosen if ".experts." in name else 1.0)
            if name.startswith(tuple(sounds)):
                continue
            if name.startswith(tuple(encoder)):
                tower += size
            else:
                decoder += size
                trained += size * weight.requires_grad
        if getattr(
            config, "tie_word_embeddings", False
        ):  # the head is the embedding, which was left out above
            decoder += config.vocab_size * config.hidden_size
            trained += (
                config.vocab_size * config.hidden_size * model.get_output_embeddings().weight.requires_grad
            )
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        layers = getattr(config, "layers_block_type", None)  # of a hybrid, some are attention
        count = layers.count("full_attention") if layers else config.num_hidden_layers
        attention = count * config.num_attention_heads * head
        return cls(decoder, tower, trained / decoder if decoder else 0.0, float(attention))

    def of_step(self, batch: StepBatch, *, passes: int, patches: int, tower_trains: bool) -> float:
        """FLOPs of one training pass and `passes` further forward passes over all samples.

        patches: rows that the tower encoded in the step, in all passes together.
        """
        lengths = [sample.length for sample in batch.samples]
        products = 2 * self.decoder * sum(lengths)
        attention = 2 * self.attention * sum(n * n for n in lengths)
        decoder = products * (2 + self.trained) + 3 * attention + passes * (products + attention)
        return decoder + 2 * self.tower * patches * (3 if tower_trains else 1)


def mfu(flops: float, seconds: float, peak_tflops: float) -> float:
    """Share of the peak that was used; peak in 10^12 operations a second."""
    return flops / (max(seconds, 1e-9) * peak_tflops * 1e12)
