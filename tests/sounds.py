"""Sounds, and the folder of a model that hears them, without its weights."""

from __future__ import annotations

import io
import json
import wave
from pathlib import Path

import numpy as np
import numpy.typing as npt

from omnifleet_trainer.tiny.hybrid import SOUND

RATE = 16_000


def tone(samples: int, hertz: float = 440.0) -> npt.NDArray[np.float32]:
    """float32 [samples] at RATE: a tone that rises, under a little noise."""
    t = np.arange(samples) / RATE
    noise = np.random.default_rng(samples).normal(0, 0.01, samples)
    return (0.4 * np.sin(2 * np.pi * hertz * (1 + t) * t) + noise).astype(np.float32)


def wav(samples: npt.NDArray[np.float32], rate: int = RATE) -> bytes:
    """The samples as a WAV file of 16 bits."""
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((1, 2, rate, len(samples), "NONE", ""))
        out.writeframes((samples * 32767).astype("<i2").tobytes())
    return file.getvalue()


def sound_model(folder: Path) -> Path:
    """A folder with a config.json that has an encoder of sounds."""
    body = {
        "model_type": "nemotron_h_omni",
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "sound_config": SOUND,
        "sound_context_token_id": 27,
    }
    (folder / "config.json").write_text(json.dumps(body))
    return folder
