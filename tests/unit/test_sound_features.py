"""Mel features of sounds, as the media service makes them, against transformers' own."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import ParakeetEncoder, PreTrainedConfig
from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor

from omnifleet.processor import read_sound_processor
from omnifleet.sounds import features_heard, mel_frames, sound_pieces, sound_tokens
from omnifleet_media.segment.sound import _filters, features_of
from omnifleet_trainer.tiny.hybrid import SOUND
from tests.sounds import sound_model, tone


@pytest.fixture
def config(tmp_path: Path) -> dict[str, Any]:
    return read_sound_processor(sound_model(tmp_path)).config


@pytest.mark.parametrize("samples", [1600, 16_000, 23_456])
def test_features_are_those_of_transformers(config: dict[str, Any], samples: int) -> None:
    """Whose extractor wants librosa for the bands alone: it is given them."""
    theirs = importlib.import_module("transformers.models.parakeet.feature_extraction_parakeet")
    extractor = object.__new__(theirs.ParakeetFeatureExtractor)
    SequenceFeatureExtractor.__init__(
        extractor, feature_size=config["feature_size"], sampling_rate=16_000, padding_value=0.0
    )
    for name in ("hop_length", "n_fft", "win_length", "preemphasis"):
        setattr(extractor, name, config[name])
    extractor.mel_filters = _filters(config["n_fft"], config["feature_size"], 16_000)
    expected = extractor([tone(samples)], sampling_rate=16_000, return_tensors="pt")
    found = features_of(tone(samples), config)
    torch.testing.assert_close(found["input_features"], expected["input_features"], rtol=1e-4, atol=1e-4)
    assert torch.equal(found["input_features_mask"], expected["attention_mask"])


@pytest.mark.parametrize("samples", [1, 1599, 16_000, 20_480, 480_000, 480_001, 500_000])
def test_tokens_are_those_of_the_encoder(config: dict[str, Any], samples: int) -> None:
    frames = [mel_frames(config, piece) for piece in sound_pieces(config, samples)]
    made = features_of(tone(samples), config)
    assert made["input_features_mask"].sum(1).tolist() == frames
    encoder = object.__new__(ParakeetEncoder)
    torch.nn.Module.__init__(encoder)
    encoder.config = PreTrainedConfig(**SOUND)
    lengths = encoder._get_subsampling_output_length(torch.tensor(frames))
    assert lengths.tolist() == [features_heard(config, n) for n in frames]
    assert sound_tokens(config, samples) == int(lengths.sum())


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_silence_has_features_too(config: dict[str, Any], value: float) -> None:
    assert features_of(np.full(4000, value, np.float32), config)["input_features"].isfinite().all()


def test_every_piece_of_a_long_sound_is_heard_by_itself(config: dict[str, Any]) -> None:
    sound = tone(480_000 + 8000)
    whole = features_of(sound, config)["input_features"]
    assert whole.shape == (2, 3001, SOUND["num_mel_bins"])
    for piece, part in zip(whole, (sound[:480_000], sound[480_000:]), strict=True):
        alone = features_of(part, config)["input_features"][0]
        assert torch.equal(piece[: len(alone)], alone)
