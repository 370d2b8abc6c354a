"""Tiny Nemotron Omni and Qwen3-VL MoE: names and settings of the published checkpoints, and transformers' own classes over them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from omnifleet.config import load_recipe
from omnifleet.errors import OmnifleetError
from omnifleet.processor import image_token_id, read_image_processor, read_video_processor
from omnifleet.vision_grid import nemotron_clip_grid
from omnifleet_trainer.policy.names import matching
from omnifleet_trainer.tiny.command import make_tiny_model
from omnifleet_trainer.tiny.hybrid import MIXED, SPECIAL, write_hybrid
from omnifleet_trainer.tiny.mixture import EXPERTS, WIDTH, write_mixture

pytestmark = pytest.mark.heavy


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("hybrid") / "model"
    write_hybrid(out)
    return out


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixed") / "model"
    write_hybrid(out, pattern=MIXED)
    return out


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("mixture") / "model"
    write_mixture(out)
    return out


def model_of(folder: Path) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
    return model.eval()


def test_a_hybrid_has_the_published_names(hybrid: Path) -> None:
    names = set(load_file(hybrid / "model.safetensors"))
    assert {name.split(".")[0] for name in names} == {"language_model", "vision_model", "mlp1"}
    assert {
        "language_model.backbone.embeddings.weight",
        "language_model.backbone.layers.0.mixer.A_log",
        "language_model.backbone.layers.1.mixer.q_proj.weight",
        "language_model.backbone.layers.2.mixer.up_proj.weight",
        "vision_model.radio_model.model.blocks.0.attn.qkv.weight",
        "vision_model.radio_model.model.patch_generator.video_embedder.weight",
        *(f"mlp1.{number}.weight" for number in (0, 1, 3)),
    } <= names
    assert not [name for name in names if "layer_scale" in name]


def test_a_hybrid_with_experts_has_their_names(mixed: Path) -> None:
    names = set(load_file(mixed / "model.safetensors"))
    gate = "language_model.backbone.layers.2.mixer"
    assert {f"{gate}.gate.weight", f"{gate}.gate.e_score_correction_bias"} <= names
    assert f"{gate}.experts.7.up_proj.weight" in names and f"{gate}.shared_experts.down_proj.weight" in names


@pytest.mark.parametrize(
    ("name", "frozen"),
    [
        ("clevr-automodel", {"vision_model", "sound_encoder"}),
        ("mmpr-automodel", {"vision_model", "sound_encoder"}),
        ("clevr-megatron", {"router"}),
        ("mmpr-megatron", {"router"}),
        ("gym-video", {"vision_model", "mlp1", "router"}),
        ("gym-video-async", {"vision_model", "mlp1", "router"}),
    ],
)
def test_recipes_freeze_what_the_reference_freezes(name: str, frozen: set[str], mixed: Path) -> None:
    """Every pattern of `model.freeze` matches the published names, and nothing of the language model but its router."""
    sounds = {"sound_encoder.encoder.layers.0.norm_out.weight", "sound_projection.linear1.weight"}
    names = set(load_file(mixed / "model.safetensors")) | sounds
    patterns = load_recipe(f"nemotron-omni/{name}", plan=True).model.freeze
    found = matching(names, patterns)
    parts = {"router" if ".gate." in weight else weight.split(".")[0] for weight in found}
    assert parts == frozen
    whole = {weight for weight in names if weight.split(".")[0] in frozen}
    assert whole <= found


def test_a_pattern_of_unknown_layers_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not X"):
        write_hybrid(tmp_path, pattern="MX")


def test_checkpoints_repeat_by_seed(tmp_path: Path, hybrid: Path, mixture: Path) -> None:
    write_hybrid(tmp_path / "h")
    write_mixture(tmp_path / "m")
    for again, first in ((tmp_path / "h", hybrid), (tmp_path / "m", mixture)):
        assert (again / "model.safetensors").read_bytes() == (first / "model.safetensors").read_bytes()
        assert sum(path.stat().st_size for path in first.iterdir()) < 9_000_000


def test_transformers_takes_the_hybrid_and_gives_it_back_bit_for_bit(hybrid: Path, tmp_path: Path) -> None:
    model_of(hybrid).save_pretrained(tmp_path)
    source, back = load_file(hybrid / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    passed_over = {name for name in source if "input_conditioner" in name}  # constants, in nobody's model
    assert len(passed_over) == 2
    assert all(torch.equal(source[name], back[name]) for name in source.keys() - passed_over)
    assert {name.rpartition(".layer_scale")[1] for name in set(back) - set(source)} == {".layer_scale"}


def test_media_tokens_of_the_hybrid_are_single(hybrid: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(hybrid)
    assert all(len(tokenizer(word, add_special_tokens=False)["input_ids"]) == 1 for word in SPECIAL)
    assert image_token_id(hybrid) == tokenizer.convert_tokens_to_ids("<image>")
    assert read_image_processor(hybrid).class_name == "NemotronH_Omni_Reasoning_V3ImageProcessor"
    clips = read_video_processor(hybrid)
    assert clips.class_name == "NemotronH_Omni_Reasoning_V3VideoProcessor"
    assert clips.config["video_target_num_patches"] == 64


def test_a_picture_and_a_clip_move_the_hybrid_s_logits(hybrid: Path) -> None:
    from transformers import (
        NemotronH_Omni_Reasoning_V3ImageProcessor,
        NemotronH_Omni_Reasoning_V3VideoProcessor,
    )

    model, token = model_of(hybrid), image_token_id(hybrid)
    pixels = np.random.default_rng(0).integers(0, 255, (2, 64, 96, 3), dtype=np.uint8)
    pictures = NemotronH_Omni_Reasoning_V3ImageProcessor.from_pretrained(hybrid)
    seen = pictures(images=[Image.fromarray(pixels[0])], return_tensors="pt")
    tokens = int(seen["image_grid_hw"].prod()) // 4
    ids = torch.tensor([[5, *[token] * tokens, 6, 7]])
    with torch.no_grad():
        first = model(input_ids=ids, **seen).logits
        other = pictures(images=[Image.fromarray(pixels[1])], return_tensors="pt")
        assert not torch.allclose(first[0, -1], model(input_ids=ids, **other).logits[0, -1])
        clips = NemotronH_Omni_Reasoning_V3VideoProcessor.from_pretrained(hybrid)
        clip = clips(videos=[pixels], do_sample_frames=False, return_tensors="pt")
        features = model.get_video_features(clip["pixel_values_videos"]).pooler_output
        grid = nemotron_clip_grid(read_video_processor(hybrid).config, 64, 96, 2)
        assert features.shape == (1, grid.tokens, 128) and grid.tokens == int(clip["num_tokens"][0])
        ids = torch.tensor([[5, *[token] * grid.tokens, 6, 7]])
        seen_clip = {"video": BaseModelOutputWithPooling(pooler_output=tuple(features))}
        assert torch.isfinite(model(input_ids=ids, mm_encoder_outputs=seen_clip).logits).all()
        # transformers 5.18 hands its forward a tensor where it wants a tuple: clips go in by their features only
        with pytest.raises(TypeError, match="must be tuple of Tensors"):
            model(input_ids=ids, pixel_values_videos=clip["pixel_values_videos"])


def test_a_mixture_has_the_hub_s_layout(mixture: Path) -> None:
    tensors = load_file(mixture / "model.safetensors")
    experts = "model.language_model.layers.0.mlp.experts"
    assert tensors[f"{experts}.gate_up_proj"].shape == (EXPERTS, 128, 2 * WIDTH)
    assert tensors[f"{experts}.down_proj"].shape == (EXPERTS, WIDTH, 128)
    assert json.loads((mixture / "config.json").read_text())["text_config"]["norm_topk_prob"] is True


def test_transformers_writes_a_mixture_transposed(mixture: Path, tmp_path: Path) -> None:
    """When this fails, `tiny.mixture` need not turn experts round any more, nor may an export trust `save_pretrained` less."""
    model = model_of(mixture)
    model.save_pretrained(tmp_path)
    source, back = load_file(mixture / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert source.keys() == back.keys()
    for name, tensor in source.items():
        turned = tensor.transpose(1, 2) if ".mlp.experts." in name else tensor
        assert torch.equal(turned, back[name]), name


@pytest.mark.parametrize("family", ["nemotron_omni", "qwen3_vl_moe"])
def test_a_family_without_a_warm_start_says_so(family: str, tmp_path: Path) -> None:
    with pytest.raises(OmnifleetError, match="no warm-started tiny model"):
        make_tiny_model(tmp_path / "x", family=family)
    make_tiny_model(tmp_path / "x", family=family, warm=False)
    assert (tmp_path / "x" / "model.safetensors").exists()
