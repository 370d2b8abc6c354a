"""What Bridge needs to be told, and what it cannot do, when the model is a Nemotron 3 Nano Omni."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from fnmatch import fnmatchcase
from typing import Any

from omnifleet.config.parallel import ParallelConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.families.nemotron import NemotronOmni

HYBRID = "nemotron_h_omni"
"""Model type of the config."""


_HEARS = {
    "subsampling_conv_channels": 256,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    "hidden_act": "silu",
    "projection_bias": False,
    "attention_bias": False,
    "convolution_bias": False,
    "scale_input": False,
}
"""What Bridge takes of an encoder of sounds, whatever the config says."""


def constants(names: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint that Bridge's model does not hold; they are handed on as they are."""
    patterns = (*NemotronOmni.passive, "*.summary_idxs", "*.num_batches_tracked")
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def check_hybrid(config: Any, parallel: ParallelConfig) -> None:
    """Raises OmnifleetError(UNSUPPORTED) for what was never made to work: see `LARGEST`, stages, and a sequence that ranks share
    throughout, where a state goes through it."""
    from omnifleet_trainer.compat.megatron_hybrid import LARGEST

    refusals = [
        (parallel.pp > 1, "trainer.parallel.pp", "all layers on a rank"),
        (parallel.cp > 1, "trainer.parallel.cp", "sequences that are whole on a rank"),
        (
            config.vision_config.max_img_size != LARGEST,
            "model.path",
            f"pictures of up to {LARGEST} pixels a side",
        ),
        (config.text_config.num_nextn_predict_layers > 0, "model.path", "models that predict one token"),
    ]
    for name, known in _HEARS.items() if config.audio_config is not None else ():
        own = getattr(config.audio_config, name, known)
        refusals.append((own != known, "model.path", f"{name} = {known} in the encoder of sounds, not {own}"))
    for refused, knob, what in refusals:
        if refused:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"the megatron backend takes Nemotron Omni with {what}", knob=knob
            )


def sizes(config: Any, parallel: ParallelConfig) -> list[tuple[Any, str, int, tuple[str, ...]]]:
    """(part of the config, knob of `parallel`, its size, fields that it must divide). A key that several queries share may be on
    several ranks."""
    text, layers = config.text_config, config.text_config.layers_block_type
    fields = ["num_attention_heads", "mamba_num_heads", "n_groups", "vocab_size"]
    if text.num_key_value_heads > parallel.tp:
        fields.append("num_key_value_heads")
    fields += ["intermediate_size"] * ("mlp" in layers)
    fields += ["moe_shared_expert_intermediate_size"] * ("moe" in layers)
    return [
        (text, "tp", parallel.tp, tuple(fields)),
        (text, "ep", parallel.ep, ("n_routed_experts",)),
        (config.vision_config, "tp", parallel.tp, ("num_attention_heads",)),
    ]


@contextlib.contextmanager
def building(config: Any) -> Iterator[None]:
    """Around the building of any model; see compat/megatron_hybrid.py."""
    if config.model_type != HYBRID:
        yield
        return
    from omnifleet_trainer.compat import megatron_hybrid

    pattern = config.text_config.layers_block_type
    experts = config.text_config.n_routed_experts if "moe" in pattern else None
    with megatron_hybrid.building(config.vision_config, experts):
        yield
