"""Mel features of sounds as Nemotron Omni's Parakeet encoder takes them.

The formulas are those of NeMo's preprocessor that transformers' `ParakeetFeatureExtractor` and vLLM's `ParakeetExtractor` follow:
emphasis of high tones, power spectrum under a Hann window, logarithm of Slaney mel bands, each band normalised over its piece.
Neither class is used: the first wants librosa, for its bands alone, and cuts no pieces; the second wants an engine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.sounds import mel_frames, sound_pieces

_SILENCE = 2.0**-24  # added before the logarithm
_FLAT = 1e-5  # added to a band's deviation


def features_of(samples: npt.NDArray[np.float32], config: Mapping[str, Any]) -> dict[str, Any]:
    """input_features float32 [pieces, frames, bands], input_features_mask bool [clips, frames]: 0 and False where a piece is
    shorter than the longest, and in its last frame, which no tone fills.

    samples: [N], `sampling_rate` a second. config: of `omnifleet.processor.read_sound_processor`.
    """
    import torch

    lengths = sound_pieces(config, len(samples))
    sound = torch.zeros(sum(lengths))
    sound[: len(samples)] = torch.from_numpy(samples.copy())
    most = 1 + mel_frames(config, max(lengths))
    features = torch.zeros(len(lengths), most, config["feature_size"])
    mask = torch.zeros(len(lengths), most, dtype=torch.bool)
    for i, piece in enumerate(torch.split(sound, lengths)):
        frames = mel_frames(config, len(piece))
        features[i, :frames] = _normalised(_bands(piece, config)[:frames])
        mask[i, :frames] = True
    return {"input_features": features, "input_features_mask": mask}


def _bands(piece: Any, config: Mapping[str, Any]) -> Any:
    """[1 + frames, bands] logarithms of power."""
    import torch

    emphasised = torch.cat([piece[:1], piece[1:] - config["preemphasis"] * piece[:-1]])
    spectrum = torch.stft(
        emphasised,
        config["n_fft"],
        hop_length=config["hop_length"],
        win_length=config["win_length"],
        window=torch.hann_window(config["win_length"], periodic=False),
        return_complex=True,
        pad_mode="constant",
    )
    power = spectrum.real.square() + spectrum.imag.square()
    filters = _filters(config["n_fft"], config["feature_size"], config["sampling_rate"])
    return torch.log(filters @ power + _SILENCE).T


def _normalised(bands: Any) -> Any:
    """Mean 0 and deviation 1 of every band."""
    return (bands - bands.mean(0)) / (bands.std(0) + _FLAT)


@lru_cache(maxsize=8)
def _filters(fft: int, bands: int, rate: int) -> Any:
    """[bands, fft / 2 + 1] weights of triangles on Slaney's mel scale, of equal area."""
    import torch
    from transformers.audio_utils import mel_filter_bank

    made = mel_filter_bank(
        num_frequency_bins=fft // 2 + 1,
        num_mel_filters=bands,
        min_frequency=0.0,
        max_frequency=rate / 2,
        sampling_rate=rate,
        norm="slaney",
        mel_scale="slaney",
    )
    return torch.from_numpy(made.T).float()
