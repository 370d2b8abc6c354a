"""Settings of a recipe that NeMo RL's recipes have: what each does, not only that it is there."""

from __future__ import annotations

import asyncio
import json
from dataclasses import make_dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from omnifleet.config import Recipe
from omnifleet.config.load import merge, recipe_from_mapping
from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import read_video_processor
from omnifleet.types import Sampling
from omnifleet.vision_grid import nemotron_clip_grid
from omnifleet.wire import rollout_pb2
from omnifleet_rollout.engine import vllm_launch
from omnifleet_rollout.engine.port import EnginePrompt
from omnifleet_rollout.worker.generation import Generation
from omnifleet_trainer.data.templates import read_template
from omnifleet_trainer.rendering import ChatTemplate
from omnifleet_trainer.server.settings import clips_of, sampling_of

BODY: dict[str, Any] = {
    "run": {"name": "t"},
    "model": {"path": "tiny"},
    "reward": [{"name": "format"}],
    "data": {"max_prompt_tokens": 200},
    "sampling": {"max_tokens": 200, "cap_to_context": True},
    "rollout": {"engine": {"max_model_len": 256}},
}


def recipe(**changes: Any) -> Recipe:
    return recipe_from_mapping(merge(BODY, changes), "test")


def refusal(**changes: Any) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        recipe(**changes)
    assert caught.value.reason is Reason.INVALID_CONFIG
    return caught.value


class Words:
    """A tokenizer of three words; everything else is one token a letter."""

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        assert not add_special_tokens
        known = {"<image>": 7, "<img>": 8, "</img>": 9}
        return {"input_ids": [known[text]] if text in known else [ord(letter) for letter in text]}


def test_a_capped_reply_may_be_as_long_as_the_context() -> None:
    assert recipe().longest_prompt == 200
    assert "cap_to_context = true" in refusal(sampling={"cap_to_context": False}).message


def test_a_prompt_leaves_room_for_a_reply() -> None:
    assert recipe(data={"min_generation_tokens": 100}).longest_prompt == 156
    assert "no reply is that long" in refusal(data={"min_generation_tokens": 201}).message
    assert "no prompt room" in refusal(data={"min_generation_tokens": 256}).message


def test_banned_words_want_raw_logprobs() -> None:
    assert "logprobs_mode = raw" in refusal(sampling={"bad_words": ["<img>"]}).message


def test_banned_words_cannot_be_kept_from_episodes() -> None:
    changes = {
        "sampling": {"bad_words": ["<img>"]},
        "rollout": {"logprobs_mode": "raw"},
        "data": {"train": {"environment": "m:C"}, "heldout": {"environment": "m:C"}},
    }
    assert "OpenAI routes" in refusal(**changes).message


def test_banned_words_reach_the_engine_as_tokens() -> None:
    raw = recipe(sampling={"bad_words": ["<image>", "</img>"]}, rollout={"logprobs_mode": "raw"})
    drawn = sampling_of(raw, ChatTemplate(Words()))
    assert drawn.banned_token_ids == (7, 9)
    assert drawn.n == raw.trainer.generations_per_prompt and drawn.max_tokens == 200


def test_a_banned_word_of_several_tokens_is_refused() -> None:
    raw = recipe(sampling={"bad_words": ["image"]}, rollout={"logprobs_mode": "raw"})
    with pytest.raises(OmnifleetError, match="5 tokens of this checkpoint") as caught:
        sampling_of(raw, ChatTemplate(Words()))
    assert caught.value.knob == "sampling.bad_words"


Arguments = make_dataclass("Arguments", [("mamba_ssm_cache_dtype", str), ("skip_mm_profiling", bool)])


def test_vllm_gets_its_own_arguments_over_our_defaults() -> None:
    asked = vllm_launch._asked({"mamba_ssm_cache_dtype": "float32"}, Arguments, cpu=True)
    assert asked == {"skip_mm_profiling": True, "mamba_ssm_cache_dtype": "float32"}
    assert vllm_launch._asked({"skip_mm_profiling": True}, Arguments, cpu=False) == {
        "skip_mm_profiling": True
    }


def test_an_argument_that_vllm_lacks_ends_the_start() -> None:
    with pytest.raises(OmnifleetError, match="near it: mamba_ssm_cache_dtype") as caught:
        vllm_launch._asked({"mamba_ssm_cache_dtyp": "float32"}, Arguments, cpu=True)
    assert caught.value.knob == "rollout.engine.arguments.mamba_ssm_cache_dtyp"


@pytest.mark.parametrize("name", ["logprobs_mode", "max_num_seqs"])
def test_an_argument_that_the_recipe_decides_elsewhere_is_refused(name: str) -> None:
    message = refusal(rollout={"engine": {"arguments": {name: 1}}}).message
    assert name in message and "other settings" in message


def test_the_length_of_clips_is_told_to_vllm() -> None:
    assert vllm_launch._clips(EngineConfig(videos_per_prompt=1)) == 1
    assert vllm_launch._clips(EngineConfig(videos_per_prompt=1, video_frames=32)) == {
        "count": 1,
        "num_frames": 32,
    }
    assert vllm_launch._clips(EngineConfig(video_frames=32)) == 0


def test_a_worker_caps_a_reply_to_what_the_context_leaves() -> None:
    """The prompt of 250 tokens leaves 6 of 256."""

    class Engine:
        facts = SimpleNamespace(max_model_len=256)

        async def prepare(self, ids: Any, media: Any, run: str) -> EnginePrompt:
            return EnginePrompt(list(ids))

    generation = object.__new__(Generation)
    generation._engine = Engine()  # type: ignore[assignment]
    request = rollout_pb2.GenerateRequest(tokens=rollout_pb2.TokenPrompt(token_ids=range(250)))
    call = asyncio.run(generation._prepare(request, Sampling(max_tokens=200)))
    assert call.sampling.max_tokens == 6


NEMOTRON = {"image_processor_type": "NemotronH_Omni_Reasoning_V3ImageProcessor", "patch_size": 16}


def test_the_run_changes_the_processor_of_clips_on_both_sides(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(NEMOTRON))
    own = read_video_processor(tmp_path)
    changed = read_video_processor(tmp_path, {"video_target_num_patches": 256})
    assert own.config == {"patch_size": 16}
    assert changed.config == {"patch_size": 16, "video_target_num_patches": 256}
    assert clips_of(tmp_path, {"video_target_num_patches": 256}) == changed, "the trainer's is the engine's"


def test_a_setting_that_a_processor_of_clips_lacks_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(NEMOTRON))
    with pytest.raises(OmnifleetError, match="no setting 'video_target_patches'") as caught:
        read_video_processor(tmp_path, {"video_target_patches": 256})
    assert caught.value.knob == "rollout.engine.clips.video_target_patches"


@pytest.mark.parametrize(
    ("width", "height", "tile"),
    [(1280, 720, (672, 384)), (320, 180, (672, 384)), (640, 640, (512, 512)), (720, 1280, (384, 672))],
)
def test_a_frame_becomes_one_tile_near_the_target(width: int, height: int, tile: tuple[int, int]) -> None:
    """The sizes of NeMo RL's own examples: 1024 patches of 16 pixels, aspect kept, small clips grown."""
    grid = nemotron_clip_grid({"video_target_num_patches": 1024}, height, width, 32)
    assert (grid.w * 16, grid.h * 16) == tile
    assert grid.tokens == 16 * (256 if width == height else 252)


def test_without_its_aspect_a_frame_becomes_a_square() -> None:
    settings = {"video_target_num_patches": 1024, "video_maintain_aspect_ratio": False}
    grid = nemotron_clip_grid(settings, 720, 1280, 32)
    assert (grid.h, grid.w, grid.tokens) == (32, 32, 16 * 256)


def test_four_small_frames_at_a_small_target() -> None:
    """NeMo RL's test: 4 frames of 16 x 8 with target 64 are tiles of 96 x 160, 15 tokens a tubelet."""
    grid = nemotron_clip_grid({"video_target_num_patches": 64}, 8, 16, 4)
    assert (grid.h * 16, grid.w * 16, grid.tokens_per_moment, grid.tokens) == (96, 160, 15, 30)


def test_a_shipped_prompt_is_known_by_its_name(tmp_path: Path) -> None:
    assert "<think>" not in read_template(Path("clevr-cogent-omni")), "the chat template opens it"
    with pytest.raises(OmnifleetError, match="no-such-prompt"):
        read_template(Path("no-such-prompt"))
