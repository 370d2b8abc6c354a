"""Teach a tiny checkpoint to say one sentence, whatever it is shown: `python -m tests.integration.one_reply FOLDER TEXT`.

A real engine with such a model calls a tool, which one of random weights never does.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

SIDE = 84
QUESTIONS = [f"Click the {colour} circle." for colour in ("red", "green", "blue", "cyan", "brown", "black")]
_STEPS, _BATCH, _SURE = 600, 6, 0.95


def teach(folder: Path, text: str) -> None:
    """Train the checkpoint in `folder` in place, in a child process. Raises AssertionError if it does not learn."""
    command = [sys.executable, "-m", "tests.integration.one_reply", str(folder), text]
    done = subprocess.run(
        command, cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]


def _teach(folder: Path, text: str) -> float:
    """Returns the probability of the whole reply after the last prompts."""
    import numpy as np
    import torch
    from PIL import Image
    from transformers import AutoModelForImageTextToText, AutoProcessor

    torch.manual_seed(0)
    torch.set_num_threads(1)  # matrices this small are slower on more, much so where others compute
    dice, noise = random.Random(0), np.random.default_rng(0)
    model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    processor = AutoProcessor.from_pretrained(folder)
    reply = processor.tokenizer(text + processor.tokenizer.eos_token)["input_ids"]
    said = torch.tensor([reply] * _BATCH)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    sure = 0.0
    for _ in range(_STEPS):
        chats = [
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": dice.choice(QUESTIONS)}],
                }
            ]
            for _ in range(_BATCH)
        ]
        pictures = [Image.fromarray(noise.integers(0, 256, (SIDE, SIDE, 3), np.uint8)) for _ in range(_BATCH)]
        prompts = [
            processor.apply_chat_template(chat, tokenize=False, add_generation_prompt=True) for chat in chats
        ]
        asked = processor(
            text=prompts, images=pictures, padding=True, padding_side="left", return_tensors="pt"
        )
        asked["input_ids"] = torch.cat([asked["input_ids"], said], 1)
        for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0)):
            if name in asked:
                asked[name] = torch.cat([asked[name], torch.full_like(said, fill)], 1)
        logits = model(**asked).logits[:, -len(reply) - 1 : -1]
        losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), said.flatten(), reduction="none")
        sure = float((-losses.detach().view(_BATCH, -1).sum(1)).exp().mean())
        if sure > _SURE:
            break
        optimizer.zero_grad()
        losses.mean().backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    model.save_pretrained(folder)
    return sure


if __name__ == "__main__":
    reached = _teach(Path(sys.argv[1]), sys.argv[2])
    if reached <= _SURE:
        raise SystemExit(f"the reply is said with probability {reached:.2f} only")
