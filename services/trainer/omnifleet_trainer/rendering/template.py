"""The checkpoint's chat template: pictures and a question to unexpanded prompt tokens."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason

_OPENED = re.compile(r"<[A-Za-z_]+>\s*\Z")


@dataclass(frozen=True)
class ChatTemplate:
    """A tokenizer with a chat template."""

    tokenizer: Any

    def render(self, text: str, pictures: int) -> list[int]:
        """[T] ids of one user turn and the opened reply: `pictures` placeholders of one token each, then `text`."""
        ids = self.tokenizer.apply_chat_template(
            _messages(text, pictures), add_generation_prompt=True, tokenize=True, return_dict=False
        )
        return [int(token) for token in ids]

    def token(self, word: str) -> int:
        """The id of a word that is one token. Raises INVALID_CONFIG for another."""
        ids = self.tokenizer(word, add_special_tokens=False)["input_ids"]
        if len(ids) != 1:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"{word!r} is {len(ids)} tokens of this checkpoint; only single tokens can be kept from replies",
                knob="sampling.bad_words",
            )
        return int(ids[0])

    def opened(self) -> str:
        """What the template already opened for the reply, e.g. "<think>\\n"; "" if nothing."""
        whole = str(
            self.tokenizer.apply_chat_template(_messages("", 0), add_generation_prompt=True, tokenize=False)
        )
        found = _OPENED.search(whole)
        return found.group() if found else ""


def load_template(model: Path, *, trust_remote_code: bool = False) -> ChatTemplate:
    """Read tokenizer and template of a checkpoint folder. Raises MODEL_MISSING."""
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(model, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        raise OmnifleetError(
            Reason.MODEL_MISSING, f"{model} has no tokenizer: {error}", knob="model.path"
        ) from error
    if not tokenizer.chat_template:
        raise OmnifleetError(Reason.MODEL_MISSING, f"{model} has no chat template", knob="model.path")
    return ChatTemplate(tokenizer)


def _messages(text: str, pictures: int) -> list[dict[str, Any]]:
    content: list[dict[str, str]] = [{"type": "image"} for _ in range(pictures)]
    return [{"role": "user", "content": [*content, {"type": "text", "text": text}]}]
