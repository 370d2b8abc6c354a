"""The trainer process with a FAKE policy whose tensors are those of the fake engine, on a handful of grey pictures."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

import omnifleet_trainer.data
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.cli import app
from omnifleet_trainer.data import PromptRow
from omnifleet_trainer.policy import build, fake

ROWS = 24


class FakeEnginePolicy(fake.FakePolicy):
    """Weights by the names and shapes of the fake engine.

    While there is a file `hold` in `folder`, a step that trains writes `held` and waits. A policy that was put off its
    device does not train.
    """

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__()
        self._folder, self._here = folder, True

    def train(self, batch: StepBatch) -> dict[str, float]:
        assert self._here, "the policy is not on its device"
        if self._folder is not None:
            while (self._folder / "hold").exists():
                (self._folder / "held").touch()
                time.sleep(0.02)
        return super().train(batch)

    def offload(self) -> None:
        self._here = False

    def onload(self) -> None:
        self._here = True

    def export(self) -> Iterator[tuple[str, Any]]:
        for index in range(3):
            yield f"layers.{index}.weight", np.full((4, 8), float(len(self.weights) + index), np.float32)

    def trainable_names(self) -> set[str]:
        return {"layers.0.weight", "layers.1.weight", "layers.2.weight"}


def load_rows(name: str, split: str, *, seed: int = 0, size: int | None = None) -> list[PromptRow]:
    """Pictures of 56 x 56 pixels: four features each, as many as the fake engine expects."""
    return [
        PromptRow(f"{split}/{i}", f"how many {i}", (_grey(i // 2),), str(i), "count")
        for i in range(size or ROWS)
    ]


def _grey(level: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (56, 56), (level, level, level)).save(out, "PNG")
    return out.getvalue()


def write_model(folder: Path) -> None:
    """A checkpoint folder as far as fakes look at it: tokenizer, template, processor, and a table of small tensors."""
    import json

    from safetensors.numpy import save_file
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    folder.mkdir(parents=True)
    save_file(dict(FakeEnginePolicy().export()), folder / "model.safetensors")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: i for i, token in enumerate(["<|end|>", "<|image|>", *alphabet])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in ("<|end|>", "<|image|>")])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}{% for part in message.content %}{% if part.type == 'image' %}<|image|>"
        "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endfor %}{% if add_generation_prompt %}:{% endif %}"
    )
    (folder / "tokenizer_config.json").write_text(
        json.dumps(
            {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|end|>", "chat_template": template}
        )
    )
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_vl", "image_token_id": 1}))
    processor = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 14,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": 28 * 28, "longest_edge": 56 * 56},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))


if __name__ == "__main__":
    omnifleet_trainer.data.load_rows = load_rows
    build.open_policy = lambda recipe, source, **_: FakeEnginePolicy(source.parent)
    app()
