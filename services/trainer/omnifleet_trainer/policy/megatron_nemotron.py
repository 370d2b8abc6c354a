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


def constants(names: Iterable[str]) -> list[str]:
    """Tensors of a checkpoint that Bridge's model does not hold; they are handed on as they are."""
    patterns = (*NemotronOmni.passive, "*.summary_idxs")
    return sorted(name for name in names if any(fnmatchcase(name, pattern) for pattern in patterns))


def check_hybrid(config: Any, parallel: ParallelConfig) -> None:
    """Raises OmnifleetError(UNSUPPORTED) for what was never made to work: see `LARGEST`, and ranks but of data."""
    from omnifleet_trainer.compat.megatron_hybrid import LARGEST

    refusals = [
        (
            parallel.tp > 1 or parallel.pp > 1 or parallel.ep > 1,
            "trainer.parallel",
            "data-parallel ranks alone",
        ),
        (
            config.vision_config.max_img_size != LARGEST,
            "model.path",
            f"pictures of up to {LARGEST} pixels a side",
        ),
        (config.text_config.num_nextn_predict_layers > 0, "model.path", "models that predict one token"),
        (config.audio_config is not None, "model.path", "models without a sound branch"),
    ]
    for refused, knob, what in refusals:
        if refused:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"the megatron backend takes Nemotron Omni with {what}", knob=knob
            )


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
