"""Nemotron Omni prompts, token for token: ours in trainer and engine, vLLM's own, transformers' own."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers import (
    AutoTokenizer,
    NemotronH_Omni_Reasoning_V3ImageProcessor,
    NemotronH_Omni_Reasoning_V3Processor,
)

from omnifleet.config.load import recipe_from_mapping
from omnifleet.errors import OmnifleetError
from omnifleet.processor import image_token_id, picture_brackets, read_video_processor, video_token_id
from omnifleet.prompt import NO_BRACKETS, expand_placeholders, lay_out
from omnifleet.vision_grid import (
    nemotron_clip_grid,
    nemotron_clip_ids,
    nemotron_clip_labels,
    nemotron_clip_text,
)
from omnifleet_rollout.gateway.media_in import clip_contract
from omnifleet_trainer.environments.open import _clips
from omnifleet_trainer.rendering import load_template
from omnifleet_trainer.tiny.hybrid import write_hybrid

pytestmark = pytest.mark.heavy

FPS = (30.0, 29.97, 24.0, 1.0)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("omni") / "model"
    write_hybrid(out)
    return out


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    return AutoTokenizer.from_pretrained(model)


@pytest.fixture(scope="module")
def theirs(model: Path, tokenizer: Any) -> NemotronH_Omni_Reasoning_V3Processor:
    """Their processor without its half for sounds, which wants librosa."""
    processor = object.__new__(NemotronH_Omni_Reasoning_V3Processor)
    processor.image_processor = NemotronH_Omni_Reasoning_V3ImageProcessor.from_pretrained(model)
    processor.tokenizer = tokenizer
    processor.video_temporal_patch_dim = 2
    processor.image_token, processor.image_start_token, processor.image_end_token = (
        "<image>",
        "<img>",
        "</img>",
    )
    return processor


def vllm_clip(tokenizer: Any, indices: list[int], fps: float, tokens: int) -> list[int]:
    """What vLLM puts in the place of a clip, by its own function."""
    from vllm.transformers_utils.processors.nano_nemotron_vl import NanoNemotronVLProcessor

    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    replaced = NanoNemotronVLProcessor.get_video_repl(
        tokens_per_frame=[tokens] * -(-len(indices) // 2),
        frames_indices=indices,
        frame_duration_ms=int(1000 / fps),
        tokenizer=tokenizer,
        img_start_token_ids=ids("<img>"),
        img_end_token_ids=ids("</img>"),
        img_context_token_ids=ids("<image>"),
        video_temporal_patch_size=2,
    )
    return list(replaced.full)


def clock(indices: list[int], fps: float) -> list[float]:
    """Seconds of frames as the manifest of a `nemotron_vl@1` clip has them."""
    return [index * int(1000 / fps) / 1000 for index in indices]


def labels_of(tokenizer: Any, times: list[float]) -> list[list[int]]:
    found: list[list[int]] = tokenizer(nemotron_clip_labels(times), add_special_tokens=False)["input_ids"]
    return found


@pytest.mark.parametrize("fps", FPS)
@pytest.mark.parametrize("indices", [[0, 6, 13, 19], [0, 0], list(range(0, 320, 10)), [3, 7, 11]])
def test_a_clip_is_vllm_s_token_for_token(
    tokenizer: Any, model: Path, indices: list[int], fps: float
) -> None:
    times = clock(indices, fps)
    ours = nemotron_clip_ids(labels_of(tokenizer, times), 15, image_token_id(model), picture_brackets(model))
    assert ours == vllm_clip(tokenizer, indices, fps, 15)
    text = nemotron_clip_text(times, 15)
    assert tokenizer(text, add_special_tokens=False)["input_ids"] == ours, "brackets keep pieces apart"


def test_a_clip_is_transformers_token_for_token(
    theirs: NemotronH_Omni_Reasoning_V3Processor, model: Path
) -> None:
    indices = [0, 6, 13, 19]
    grid = nemotron_clip_grid(read_video_processor(model).config, 8, 16, len(indices))
    assert grid.tokens_per_moment == 15, "the example of NeMo RL's own test"
    metadata = SimpleNamespace(fps=29.97, frames_indices=indices)
    text = theirs.replace_video_token(
        {"num_tokens": [15] * 4}, 0, num_frames=len(indices), video_metadata=metadata
    )
    assert text == nemotron_clip_text(clock(indices, 29.97), grid.tokens_per_moment)


def test_pictures_are_transformers_token_for_token_in_trainer_and_engine(
    theirs: NemotronH_Omni_Reasoning_V3Processor, model: Path
) -> None:
    pictures = [Image.fromarray(np.full((h, w, 3), 90, np.uint8)) for h, w in ((64, 96), (160, 48))]
    template, token, brackets = load_template(model), image_token_id(model), picture_brackets(model)
    asked = template.render("Which is larger?", 2)
    text = template.tokenizer.apply_chat_template(
        [{"role": "user", "content": [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "Which is larger?"}]}],
        add_generation_prompt=True,
        tokenize=False,
    )  # fmt: skip
    seen = theirs.image_processor(images=pictures, return_tensors="pt")
    for number in range(len(pictures)):
        text = text.replace(
            "<image>", theirs.replace_image_token(seen, number).replace("<image>", "<so_end>"), 1
        )
    want = template.tokenizer(text.replace("<so_end>", "<image>"), add_special_tokens=False)["input_ids"]
    counts = [int(grid.prod()) // 4 for grid in np.asarray(seen["image_grid_hw"])]
    assert expand_placeholders(asked, token, counts, brackets) == want, "the trainer's"
    placeholders = {token, video_token_id(model)}
    ids, ranges = lay_out(asked, [(token, count) for count in counts], placeholders, brackets)
    assert ids == want, "the engine's"
    for (first, length), count in zip(ranges, counts, strict=True):
        assert length == count and ids[first : first + length] == [token] * count
        assert (ids[first - 1], ids[first + length]) == (brackets[0][0], brackets[1][0])


def test_a_picture_is_vllm_s_token_for_token(model: Path, tokenizer: Any) -> None:
    from vllm.transformers_utils.processors.nano_nemotron_vl import NanoNemotronVLProcessor

    token = image_token_id(model)
    vllm = SimpleNamespace(tokenizer=tokenizer, _img_context_token_ids=[token])
    replaced = NanoNemotronVLProcessor.get_image_repl(vllm, 24, None)
    assert list(replaced.full) == expand_placeholders([token], token, [24], picture_brackets(model))


def test_the_reply_begins_inside_the_thinking(model: Path) -> None:
    assert load_template(model).opened() == "<think>\n"


def test_other_families_write_their_own_brackets(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["Qwen2VLForConditionalGeneration"]}))
    assert picture_brackets(tmp_path) == NO_BRACKETS


def test_a_tokenizer_without_brackets_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "nemotron_h_omni"}))
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": [{"id": 1, "content": "<img>"}]}))
    with pytest.raises(OmnifleetError, match="has no <img> or </img>"):
        picture_brackets(tmp_path)


def test_clips_are_sampled_in_whole_temporal_patches_by_gateway_and_trainer(model: Path) -> None:
    """The family's files leave `temporal_patch_size` out: it is 2, not none."""
    recipe = recipe_from_mapping(
        {
            "run": {"name": "t"},
            "model": {"path": str(model)},
            "reward": [{"name": "mcqa"}],
            "gateway": {"clip_sampling": "nemotron_vl@1", "clip_frames": 32},
        },
        "test",
    )
    ours, theirs = _clips(recipe), clip_contract(recipe.gateway, model)
    assert ours == theirs and ours.temporal_patch == 2 and ours.num_frames == 32
