"""Sounds in prompts, by the rules of Nemotron Omni: how many tokens a track takes, which token, between which. No tensor library.

The family's encoder (Parakeet) sees a track in pieces of 30 s; a piece is a mel frame each `hop_length` samples, which
`log2(subsampling_factor)` convolutions of stride 2 thin out. This is vLLM's count, which decides what a prompt is. transformers'
processor and model know no pieces, and count a frame more: where the frames are a multiple of the factor they have one token more,
whose feature lies behind the sound's end.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.model_files import bracket_ids, read_model_config
from omnifleet.prompt import Brackets

PIECE_S, SHORTEST_S = 30.0, 0.1
"""Seconds that the encoder sees at once, and up to which a shorter track, or a track's last piece, is filled with silence."""
_HOP = 160
_BRACKETS = ("<so_start>", "<so_end>")
_TOKENS = ("sound_context_token_id", "audio_token_id")
_CONFIGS = ("sound_config", "audio_config")


def read_sound_config(model_dir: Path) -> dict[str, Any]:
    """What a checkpoint's config.json says about its encoder of sounds: `sampling_rate`, `num_mel_bins`, ...

    Raises OmnifleetError(MODEL_MISSING) without the file, UNSUPPORTED for a model that takes no sounds.
    """
    config = read_model_config(model_dir)
    found = next((config[name] for name in _CONFIGS if isinstance(config.get(name), dict)), None)
    if found is None or "sampling_rate" not in found:
        raise OmnifleetError(
            Reason.UNSUPPORTED, f"the model in {model_dir} takes no sounds", knob="model.path"
        )
    return dict(found)


def sound_token_id(model_dir: Path) -> int:
    """Id of the placeholder token that stands for a feature of a sound. Raises as `read_sound_config`."""
    config = read_model_config(model_dir)
    for name in _TOKENS:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise OmnifleetError(
        Reason.UNSUPPORTED,
        f"{model_dir}/config.json names no token of sounds ({', '.join(_TOKENS)})",
        knob="model.path",
    )


def sound_brackets(model_dir: Path) -> Brackets:
    """Tokens around the features of every sound, whose placeholder the chat template writes alone.

    Raises OmnifleetError(INVALID_CONFIG) if the tokenizer lacks one of them.
    """
    return bracket_ids(model_dir, _BRACKETS)


def sound_pieces(config: Mapping[str, Any], samples: int) -> list[int]:
    """Samples of each piece in which the encoder sees a track of `samples`; the last is filled up to SHORTEST_S."""
    rate = int(config["sampling_rate"])
    whole, least = round(PIECE_S * rate), round(SHORTEST_S * rate)
    full, rest = divmod(max(samples, least), whole)
    return [whole] * full + ([max(rest, least)] if rest else [])


def sound_tokens(config: Mapping[str, Any], samples: int) -> int:
    """Placeholder tokens of a track of `samples`; config: as `read_sound_config` gives it."""
    pieces = sound_pieces(config, samples)
    return max(sum(features_heard(config, mel_frames(config, piece)) for piece in pieces), 1)


def mel_frames(config: Mapping[str, Any], samples: int) -> int:
    """Mel frames of one piece that count; its spectrogram has one more."""
    return samples // int(config.get("hop_length") or _HOP)


def features_heard(config: Mapping[str, Any], frames: int) -> int:
    """Features that the encoder makes of the mel frames of one piece."""
    kernel, stride = int(config["subsampling_conv_kernel_size"]), int(config["subsampling_conv_stride"])
    padding = (kernel - 1) // 2 * 2
    for _ in range(int(math.log2(int(config["subsampling_factor"])))):
        frames = (frames + padding - kernel) // stride + 1
    return frames
