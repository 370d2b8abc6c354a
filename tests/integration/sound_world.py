"""Tones as files, and what transformers' model says about them: for tests of engines that hear."""

from __future__ import annotations

import io
import wave
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from omnifleet.processor import image_token_id
from omnifleet.sounds import read_sound_config, sound_token_id
from omnifleet_rollout.engine import vllm_seams as seams

RATE = 16_000
_SOUND_PARTS = ("audio_tower", "embed_audio")


def tone(seconds: float, hertz: float) -> bytes:
    """A sine as a WAV file of one channel."""
    samples = np.sin(np.arange(round(seconds * RATE)) * (2 * np.pi * hertz / RATE)) * 16_000
    out = io.BytesIO()
    with wave.open(out, "wb") as file:
        file.setparams((1, 2, RATE, 0, "NONE", ""))
        file.writeframes(samples.astype("<i2").tobytes())
    return out.getvalue()


def reference(
    source: Path,
    weights: Mapping[str, Any],
    tracks: Sequence[Any],
    prompt: Sequence[int],
    reply: Sequence[int],
) -> Any:
    """transformers' logprobs of `reply` after the expanded `prompt`, float32 but for the encoder of sounds.

    source: the checkpoint's folder; weights: those to use. tracks: float32 samples of each sound.
    """
    import torch

    model = _loaded(source, weights, torch.float32)
    for name, module in model.named_modules():
        if name.endswith(_SOUND_PARTS):
            module.to(torch.bfloat16)
    extractor = seams.sound_extractor(read_sound_config(source))
    made = [seams.extract_sound(extractor, track) for track in tracks]
    longest = max(one["input_audio_features"].shape[1] for one in made)

    def padded(name: str) -> Any:
        rows = [torch.from_numpy(np.array(row)) for one in made for row in one[name]]
        out = torch.zeros((len(rows), longest, *rows[0].shape[1:]), dtype=rows[0].dtype)
        for at, row in enumerate(rows):
            out[at, : len(row)] = row
        return out

    features, mask = padded("input_audio_features"), padded("feature_attention_mask")
    tower, projection = (found for name, found in model.named_modules() if name.endswith(_SOUND_PARTS))
    with torch.no_grad():
        states = projection(tower(input_features=features.bfloat16(), attention_mask=mask).last_hidden_state)
        lengths = tower._get_subsampling_output_length(
            mask.sum(-1)
        )  # without transformers' frame behind the end
        heard = torch.cat([row[:length] for row, length in zip(states, lengths.tolist(), strict=True)])
    return _scored(model, heard, sound_token_id(source), prompt, reply)


def seen(
    source: Path,
    weights: Mapping[str, Any],
    segment: Mapping[str, Any],
    prompt: Sequence[int],
    reply: Sequence[int],
) -> Any:
    """Like `reference`, of one picture, whose tower is in bfloat16."""
    import torch

    pixels = torch.from_numpy(segment["pixel_values"].copy()).bfloat16()
    grid = torch.from_numpy(segment["image_grid_hw"].copy())
    with torch.no_grad():
        tower = _loaded(source, weights, torch.bfloat16)
        features = torch.cat(list(tower.get_image_features(pixels, grid, return_dict=True).pooler_output))
    model = _loaded(source, weights, torch.float32)
    return _scored(model, features, image_token_id(source), prompt, reply)


def _loaded(source: Path, weights: Mapping[str, Any], dtype: Any) -> Any:
    from safetensors.torch import save_file
    from transformers import AutoModelForImageTextToText

    folder = source.parent / "reference"
    folder.mkdir(exist_ok=True)
    for file in source.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    return AutoModelForImageTextToText.from_pretrained(folder, dtype=dtype).eval()


def _scored(model: Any, features: Any, mark: int, prompt: Sequence[int], reply: Sequence[int]) -> Any:
    """Logprobs of `reply` with features [n, width] in the places of `mark`."""
    import torch

    ids = torch.tensor([[*prompt, *reply[:-1]]])
    with torch.no_grad():
        embedded = model.get_input_embeddings()(ids)
        places = (ids == mark)[..., None].expand_as(embedded)
        logits = model(inputs_embeds=embedded.masked_scatter(places, features.float())).logits[0]
    rows = torch.log_softmax(logits[len(prompt) - 1 :].float(), -1)
    return np.array([float(row[token]) for row, token in zip(rows, reply, strict=True)])


def gap(found: Sequence[float], expected: Any) -> float:
    return float(np.abs(np.array(found) - expected).max())
