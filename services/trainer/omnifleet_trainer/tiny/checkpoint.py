"""Write a small checkpoint of a Qwen-VL family with random weights: config, float32 safetensors, tokenizer, processors.

Heads are 64 wide in language and vision, so that the same folder runs on CPU and GPU attention kernels. Embeddings
and output head are untied: CPU engines pack the head apart from the embeddings, and a refit then loads each by its
own name.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from omnifleet_trainer.tiny.families import HEAD, MODELS, PATCH, PROCESSORS, Family, family_config
from omnifleet_trainer.tiny.scenes import ANSWERS, COLOURS, PROMPT, SHAPES, SIDE

SPECIAL = (
    "<|endoftext|>",
    "<|im_start|>",
    "<|im_end|>",
    "<|vision_start|>",
    "<|vision_end|>",
    "<|vision_pad|>",
    "<|image_pad|>",
    "<|video_pad|>",
)
TAGS = ("<think>", "</think>", "<answer>", "</answer>")
MERGES = 128
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type in ('image', 'image_url') %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif part.type in ('video', 'video_url') %}<|vision_start|><|video_pad|><|vision_end|>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_checkpoint(
    out: Path,
    *,
    seed: int = 0,
    hidden: int = 128,
    layers: int = 2,
    tie_embeddings: bool = False,
    family: Family = "qwen2_vl",
) -> None:
    """Write the checkpoint folder ``out`` (made if missing); equal arguments give equal weights.

    ``hidden`` is the model width and must be a multiple of 64; ``layers`` counts language layers. Raises
    ValueError on another width.
    """
    if hidden < HEAD or hidden % HEAD:
        raise ValueError(f"hidden must be a multiple of {HEAD}, not {hidden}")
    out.mkdir(parents=True, exist_ok=True)
    vocabulary = _write_tokenizer(out)
    _write_processors(out, family)
    config = family_config(family, vocabulary, hidden=hidden, layers=layers, tie_embeddings=tie_embeddings)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = getattr(transformers, MODELS[family])(config)
    model.generation_config.eos_token_id = vocabulary["<|im_end|>"]
    model.generation_config.pad_token_id = vocabulary["<|endoftext|>"]
    model.save_pretrained(out)


def _write_tokenizer(out: Path) -> dict[str, int]:
    """A byte-level BPE whose merges are learnt from the tiny world's own sentences; returns token -> id.

    The tags are added but not special, so they are one token each and stay in decoded text.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=256 + MERGES,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_sentences(), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in TAGS])
    tokenizer.save(str(out / "tokenizer.json"))
    _write_json(
        out / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 4096,
            "chat_template": CHAT_TEMPLATE,
            "image_token": "<|image_pad|>",
            "video_token": "<|video_pad|>",
        },
    )
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return dict(tokenizer.get_vocab())


def _sentences() -> list[str]:
    """Text whose words become single tokens: roles, prompt, questions and answers."""
    words = [*COLOURS, *SHAPES]
    questions = [f"Is there a {colour} {shape}?" for colour in COLOURS for shape in SHAPES]
    questions += [f"What colour is the {shape}?" for shape in SHAPES]
    questions += [f"How many {colour} things? What shape is the {colour} thing?" for colour in COLOURS]
    answers = [answer for kind in ANSWERS.values() for answer in kind]
    prompt = PROMPT.replace("<think></think><answer></answer>", "")
    return [*("user\nassistant\nsystem\n", prompt, *questions, *answers, *words) * 4]


def _write_processors(out: Path, family: Family) -> None:
    """Image and video processors that keep the tiny pictures at their own size (one token for 28 x 28 pixels; 32 x 32
    in Qwen3-VL)."""
    processor, videos = PROCESSORS[family]
    shared = {
        "processor_class": processor,
        "patch_size": PATCH[family],
        "temporal_patch_size": 2,
        "merge_size": 2,
        "size": {"shortest_edge": (2 * PATCH[family]) ** 2, "longest_edge": 4 * SIDE**2},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
    }
    _write_json(out / "preprocessor_config.json", {"image_processor_type": "Qwen2VLImageProcessor", **shared})
    _write_json(out / "video_preprocessor_config.json", {"video_processor_type": videos, **shared})
    _write_json(out / "processor_config.json", {"processor_class": processor})


def _write_json(path: Path, content: dict[str, object]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
