"""A small Nemotron 3 Nano Omni with random weights: Mamba-2, attention and MLP (or experts) under a RADIO tower.

Names of tensors and settings are those of the published checkpoint; its sound branch, a Parakeet encoder, is there if asked
for. transformers 5.18 reads it by classes of its own, without the checkpoint's code; vLLM by its own loader. The tower has
one head of 64 and, as the published one, 3 class and 7 register tokens before its patches.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken, Tokenizer
from transformers import NemotronH_Omni_Reasoning_V3, NemotronH_Omni_Reasoning_V3_Config
from transformers.audio_utils import mel_filter_bank

from omnifleet_trainer.tiny.checkpoint import write_checkpoint

DENSE, MIXED = "M*-M", "M*EM"
"""Layers from the first: M Mamba-2, * attention, - MLP, E experts. vLLM's CPU build cannot run experts of this kind."""
SPECIAL = ("<image>", "<img>", "</img>", "<video>", "<so_embedding>", "<so_start>", "<so_end>")
PATCH, TOWER, DOWNSAMPLE = 16, 64, 0.5
LARGEST = 2048
"""Pixels of the largest side that has embeddings of places; megatron-bridge knows no other number."""
MEAN, STD = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711]
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}"
    "{% for part in message.content %}{% if not loop.first %}\n{% endif %}"
    "{% if part.type in ('image', 'image_url') %}<image>{% elif part.type in ('video', 'video_url') %}<video>"
    "{% elif part.type in ('audio', 'input_audio', 'audio_url') %}<so_embedding>"
    "{% elif part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n<think>\n{% endif %}"
)
SOUND: dict[str, Any] = {
    "model_type": "parakeet",
    "hidden_size": 64,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "intermediate_size": 128,
    "conv_kernel_size": 9,
    "convolution_bias": False,
    "subsampling_factor": 8,
    "subsampling_conv_channels": 256,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
    "num_mel_bins": 32,
    "projection_hidden_size": 128,
    "projection_bias": False,
    "sampling_rate": 16_000,
}
"""The published settings, smaller, but for the 256 channels: megatron-bridge knows no other number."""
_FFT, _WINDOW = 512, 400
_LAYERS = {"M": "linear_attention", "*": "full_attention", "-": "mlp", "E": "moe"}
_NOT_PUBLISHED = (".layer_scale1.", ".layer_scale2.", ".num_batches_tracked")
"""Identities and counters that transformers' class has and the published checkpoint has not."""


def write_hybrid(
    out: Path, *, seed: int = 0, hidden: int = 128, pattern: str = DENSE, sound: bool = False
) -> None:
    """Write the checkpoint folder `out`; equal arguments give equal weights.

    hidden: model width, a multiple of 64. pattern: one letter a language layer, see DENSE. sound: with an encoder of sounds.
    Raises ValueError for another letter.
    """
    if unknown := sorted(set(pattern) - set(_LAYERS)):
        raise ValueError(f"layers are of {''.join(_LAYERS)}, not {''.join(unknown)}")
    write_checkpoint(out, seed=seed, hidden=hidden)  # for its tokenizer
    vocabulary = _write_tokenizer(out)
    _write_processors(out, sound=sound)
    config = _config(vocabulary, hidden, pattern, sound=sound)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = NemotronH_Omni_Reasoning_V3(config)
        _widen(model)
    model.generation_config.eos_token_id = vocabulary["<|im_end|>"]
    model.generation_config.pad_token_id = vocabulary["<|endoftext|>"]
    model.save_pretrained(out)
    _as_published(out, pattern, sound=sound)


def _config(
    vocabulary: dict[str, int], hidden: int, pattern: str, *, sound: bool
) -> NemotronH_Omni_Reasoning_V3_Config:
    heads = hidden // 64
    text = {
        "vocab_size": -(-len(vocabulary) // 64) * 64,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "layers_block_type": [_LAYERS[letter] for letter in pattern],
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": 64,
        "mamba_num_heads": 8,
        "mamba_head_dim": hidden // 4,
        "n_groups": 2,
        "ssm_state_size": 16,
        "conv_kernel": 4,
        "chunk_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_shared_experts": 1,
        "moe_intermediate_size": 64,
        "moe_shared_expert_intermediate_size": 64,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "initializer_range": 0.05,
        "bos_token_id": vocabulary["<|endoftext|>"],
        "eos_token_id": vocabulary["<|im_end|>"],
        "pad_token_id": vocabulary["<|endoftext|>"],
    }
    vision = {
        "hidden_size": TOWER,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "patch_size": PATCH,
        "max_img_size": LARGEST,
        "image_size": 224,
        "video_temporal_patch_size": 2,
        "norm_mean": MEAN,
        "norm_std": STD,
    }
    return NemotronH_Omni_Reasoning_V3_Config(
        text_config=text,
        vision_config=vision,
        audio_config={**SOUND, "initializer_range": 0.05} if sound else None,
        force_image_size=224,
        projector_hidden_size=2 * hidden,
        vision_hidden_size=TOWER,
        downsample_ratio=DOWNSAMPLE,
        image_token_id=vocabulary["<image>"],
        video_token_id=vocabulary["<video>"],
        audio_token_id=vocabulary["<so_embedding>"] if sound else None,
        dtype="float32",
    )


def _widen(model: torch.nn.Module) -> None:
    """Zero embeddings of places and tokens of the tower would hide mistakes in their order; statistics of 0 and 1 in the
    encoder of sounds, that they were lost."""
    with torch.no_grad():
        for name, tensor in (*model.named_parameters(), *model.named_buffers()):
            if name.endswith(("position_embedding", "cls_register_token", "conv.norm.running_mean")):
                tensor.normal_(0, 0.1)
            if name.endswith("conv.norm.running_var"):
                tensor.uniform_(0.5, 1.5)


def _as_published(folder: Path, pattern: str, *, sound: bool) -> None:
    """Drop what the published checkpoint lacks; add settings and constants that its own code and vLLM read, or pass over."""
    tensors = load_file(folder / "model.safetensors")
    kept = {name: t for name, t in tensors.items() if not any(part in name for part in _NOT_PUBLISHED)}
    for name, values in (("norm_mean", MEAN), ("norm_std", STD)):
        kept[f"vision_model.radio_model.input_conditioner.{name}"] = torch.tensor(values).view(3, 1, 1)
    if sound:
        kept |= {
            f"sound_encoder.encoder.feature_extractor.featurizer.{n}": t for n, t in _featurizer().items()
        }
    save_file(kept, folder / "model.safetensors", metadata={"format": "pt"})
    path = folder / "config.json"
    body: dict[str, Any] = json.loads(path.read_text())
    body |= {
        "architectures": ["NemotronH_Nano_Omni_Reasoning_V3"],
        "vit_hidden_size": TOWER,
        "patch_size": PATCH,
        "template": "nemotron5h",
        "ps_version": "v2",
        "image_tag_type": "internvl",
        "use_thumbnail": True,
        "norm_mean": MEAN,
        "norm_std": STD,
        "img_context_token_id": body["image_token_id"],
        "video_context_token_id": body["video_token_id"],
    }
    if sound:
        body |= {"sound_config": SOUND, "sound_context_token_id": body["audio_token_id"]}
        del body["audio_config"]
    # vLLM gives tower and projector this type, whatever it computes in; the published one is this too.
    body["text_config"] |= {"hybrid_override_pattern": pattern, "dtype": "bfloat16"}
    body["vision_config"] |= {"separate_video_embedder": True, "args": _tower_arguments()}
    path.write_text(json.dumps(body, indent=1) + "\n")


def _featurizer() -> dict[str, torch.Tensor]:
    """Constants of the encoder's own features, which nobody reads: mel filters [1, mels, _FFT / 2 + 1], window [_WINDOW]."""
    rate = SOUND["sampling_rate"]
    filters = mel_filter_bank(
        _FFT // 2 + 1, SOUND["num_mel_bins"], 0.0, rate / 2, rate, norm="slaney", mel_scale="slaney"
    )
    return {
        "fb": torch.from_numpy(filters.T).float()[None].contiguous(),
        "window": torch.hann_window(_WINDOW, periodic=False),
    }


def _tower_arguments() -> dict[str, Any]:
    """What the published config tells RADIO's own code; the sizes after `model` make vLLM's named tower this small."""
    return {
        "model": "vit_small_patch16_224",
        "min_num_patches": 4,
        "max_num_patches": 256,
        "cpe_max_size": LARGEST,
        "register_multiple": 10,
        "cls_token_per_teacher": True,
        "teachers": [{"name": name, "use_summary": True} for name in ("a", "b", "c")],
        "hidden_size": TOWER,
        "num_hidden_layers": 2,
        "num_attention_heads": 1,
        "intermediate_size": 4 * TOWER,
    }


def _write_tokenizer(out: Path) -> dict[str, int]:
    """The tiny world's tokenizer with this family's media tokens and template; returns token -> id."""
    tokenizer = Tokenizer.from_file(str(out / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
    tokenizer.save(str(out / "tokenizer.json"))
    settings = json.loads((out / "tokenizer_config.json").read_text())
    settings |= {
        "chat_template": CHAT_TEMPLATE,
        "image_token": "<image>",
        "video_token": "<video>",
        "audio_token": "<so_embedding>",
    }
    _write(out / "tokenizer_config.json", settings)
    (out / "chat_template.jinja").write_text(CHAT_TEMPLATE)
    return dict(tokenizer.get_vocab())


def _write_processors(out: Path, *, sound: bool) -> None:
    """As published: one file, from which clips take their settings too."""
    (out / "video_preprocessor_config.json").unlink()
    _write(
        out / "preprocessor_config.json",
        {
            "image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor",
            "processor_class": "NemotronH_Omni_Reasoning_V3Processor",
            "patch_size": PATCH,
            "downsample_ratio": DOWNSAMPLE,
            "min_num_patches": 4,
            "max_num_patches": 256,
            "max_model_len": 4096,
            "norm_mean": MEAN,
            "norm_std": STD,
            "video_target_num_patches": 64,
            "video_maintain_aspect_ratio": True,
        },
    )
    processor: dict[str, Any] = {"processor_class": "NemotronH_Omni_Reasoning_V3Processor"}
    if sound:
        processor["feature_extractor"] = {
            "feature_extractor_type": "ParakeetFeatureExtractor",
            "feature_size": SOUND["num_mel_bins"],
            "sampling_rate": SOUND["sampling_rate"],
            "hop_length": 160,
            "n_fft": _FFT,
            "win_length": _WINDOW,
            "preemphasis": 0.97,
            "padding_value": 0.0,
        }
    _write(out / "processor_config.json", processor)


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")
