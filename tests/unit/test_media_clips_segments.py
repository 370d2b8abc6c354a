"""Model-ready tensors of clips, and the plain-number helpers that say their size beforehand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import transformers
from safetensors.numpy import load

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import ProcessorSpec, read_video_processor, video_token_id
from omnifleet.vision_grid import (
    VisionGrid,
    moments,
    nemotron_clip_grid,
    nemotron_clip_text,
    qwen2vl_grid,
)
from omnifleet_media.sandbox.frames import own_room
from omnifleet_media.segment.work import work

QWEN: dict[str, Any] = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
NEMOTRON: dict[str, Any] = {"norm_mean": [0.5] * 3, "norm_std": [0.25] * 3, "video_target_num_patches": 64}
C5 = {"patch_size": 14, "merge_size": 2, "size": {"shortest_edge": 3136, "longest_edge": 1_003_520}}


def noise(frames: int, width: int, height: int) -> np.ndarray:
    return np.random.default_rng(frames).integers(0, 256, (frames, height, width, 3), np.uint8)


def made(
    class_name: str, config: dict[str, Any], frames: np.ndarray
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    header = {
        "class_name": class_name,
        "config": config,
        "config_json": json.dumps(config),
        "shape": list(frames.shape),
    }
    answer, (body,) = work(header, bytearray(frames.tobytes()), own_room)
    return answer, load(bytes(body))


@pytest.mark.parametrize(("frames", "width", "height"), [(1, 90, 60), (2, 56, 56), (5, 33, 97), (16, 64, 48)])
def test_qwen_clips_are_what_transformers_makes(frames: int, width: int, height: int) -> None:
    pixels = noise(frames, width, height)
    answer, tensors = made("Qwen2VLVideoProcessor", QWEN, pixels)
    expected = transformers.Qwen2VLVideoProcessor.from_dict(dict(QWEN))(
        videos=[pixels], do_sample_frames=False, return_tensors="np"
    )
    assert (tensors["pixel_values_videos"] == expected["pixel_values_videos"]).all()
    assert tensors["video_grid_thw"].tolist() == expected["video_grid_thw"].tolist()
    grid = qwen2vl_grid(QWEN, height, width, frames)
    assert answer == {"token_count": grid.tokens, "grid": [grid.t, grid.h, grid.w]}
    assert grid.t == moments(frames, 2)


def test_a_config_that_samples_does_not_sample_again() -> None:
    answer, _ = made(
        "Qwen2VLVideoProcessor", {**QWEN, "do_sample_frames": True, "num_frames": 4}, noise(8, 56, 56)
    )
    assert answer["grid"][0] == 4


@pytest.mark.parametrize(("width", "height"), [(160, 90), (64, 64), (90, 160), (300, 20)])
def test_nemotron_clips_are_what_transformers_makes(width: int, height: int) -> None:
    pixels = noise(3, width, height)
    answer, tensors = made("NemotronH_Omni_Reasoning_V3VideoProcessor", NEMOTRON, pixels)
    expected = transformers.NemotronH_Omni_Reasoning_V3VideoProcessor.from_dict(dict(NEMOTRON))(
        videos=[pixels], do_sample_frames=False, return_tensors="np"
    )
    grid = nemotron_clip_grid(NEMOTRON, height, width, 3)
    assert (tensors["pixel_values_videos"] == expected["pixel_values_videos"]).all()
    assert tensors["imgs_sizes"].tolist() == [[grid.h * 16, grid.w * 16]] * 3
    assert tensors["num_frames"].tolist() == [3]
    assert [grid.tokens_per_moment] * 3 == list(expected["num_tokens"])
    assert answer == {"token_count": 2 * grid.tokens_per_moment, "grid": [2, grid.h, grid.w]}


def test_nemotron_pixels_are_bicubic_with_antialiasing() -> None:
    import torch

    pixels = noise(2, 100, 70)
    _, tensors = made("NemotronH_Omni_Reasoning_V3VideoProcessor", NEMOTRON, pixels)
    size = tuple(tensors["imgs_sizes"][0].tolist())
    raw = torch.from_numpy(pixels).permute(0, 3, 1, 2).float()
    resized = torch.nn.functional.interpolate(raw, size, mode="bicubic", antialias=True, align_corners=False)
    assert (tensors["pixel_values_videos"] == ((resized / 255 - 0.5) / 0.25).numpy()).all()


@pytest.mark.parametrize(
    ("width", "height", "patches"),
    [(1280, 720, (24, 42)), (320, 180, (24, 42)), (640, 640, (32, 32)), (720, 1280, (42, 24))],
)
def test_nemotron_tiles_of_common_sizes(width: int, height: int, patches: tuple[int, int]) -> None:
    grid = nemotron_clip_grid({}, height, width, 32)
    assert (grid.t, (grid.h, grid.w)) == (16, patches)
    assert grid.tokens_per_moment == patches[0] * patches[1] // 4


def test_nemotron_square_tile_when_the_aspect_is_not_kept() -> None:
    grid = nemotron_clip_grid({"video_maintain_aspect_ratio": False}, 180, 320, 1)
    assert (grid.t, grid.h, grid.w) == (1, 32, 32)


def test_nemotron_prompt_names_the_times_of_each_tubelet() -> None:
    times = [i * int(1000 / 29.97) / 1000 for i in (0, 30, 61)]
    assert nemotron_clip_text(times, 2) == (
        "Frame 1 sampled at 0.00 seconds and frame 2 sampled at 0.99 seconds: <img><image><image></img>\n"
        "Frame 3 sampled at 2.01 seconds: <img><image><image></img>"
    )


def test_nemotron_pictures_have_a_grid_and_a_count() -> None:
    config = {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "min_num_patches": 16, "max_num_patches": 64}
    answer, tensors = made("NemotronH_Omni_Reasoning_V3ImageProcessor", config, noise(1, 90, 60))
    _, h, w = answer["grid"]
    assert tensors["image_grid_hw"].tolist() == [[h, w]]
    assert tensors["pixel_values"].shape == (h * w, 768)
    assert answer["token_count"] == h * w // 4


def test_img_14_no_side_is_scaled_to_nothing() -> None:
    config = {**C5, "size": {"shortest_edge": 3136, "longest_edge": 20_384}}
    assert qwen2vl_grid(config, 900, 34) == VisionGrid(1, 52, 2, 2)
    assert qwen2vl_grid(config, 900, 34).tokens == 26
    answer, _ = made("Qwen2VLImageProcessor", config, noise(1, 34, 900))
    assert answer == {"token_count": 26, "grid": [1, 52, 2]}


def test_img_16_a_ratio_of_200_is_the_last() -> None:
    assert qwen2vl_grid(C5, 28, 5600).tokens == 200
    assert made("Qwen2VLImageProcessor", C5, noise(1, 5600, 28))[0]["token_count"] == 200
    for width, height in ((5601, 28), (201, 1)):
        with pytest.raises(OmnifleetError, match="200") as caught:
            made("Qwen2VLImageProcessor", C5, noise(1, width, height))
        assert caught.value.reason is Reason.INVALID_REQUEST
        with pytest.raises(OmnifleetError, match="200"):
            qwen2vl_grid(C5, height, width)


def test_vid_03_tokens_are_of_the_turned_clip() -> None:
    assert qwen2vl_grid(C5, 64, 32) != qwen2vl_grid(C5, 32, 64)
    assert made("Qwen2VLVideoProcessor", QWEN, noise(2, 32, 64))[0]["grid"][1:] == [4, 2]


def test_vid_09_one_frame_is_one_temporal_patch() -> None:
    assert made("Qwen2VLVideoProcessor", QWEN, noise(1, 56, 56))[0]["grid"] == [1, 4, 4]


def test_the_video_processor_of_a_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 5, "video_token_id": 6}))
    pictures = {"image_processor_type": "Qwen2VLImageProcessorFast", **QWEN}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(pictures))
    like_pictures = read_video_processor(tmp_path)
    assert like_pictures == ProcessorSpec("Qwen2VLVideoProcessor", QWEN)
    clips = {"video_processor_type": "Qwen2VLVideoProcessor", **QWEN, "fps": 2, "do_sample_frames": True}
    (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(clips))
    assert read_video_processor(tmp_path) == like_pictures
    assert (like_pictures.temporal_patch, video_token_id(tmp_path)) == (2, 6)


def test_a_family_without_a_video_token_writes_the_image_token(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"img_context_token_id": 18}))
    assert video_token_id(tmp_path) == 18


def test_a_checkpoint_whose_clips_are_unknown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"image_processor_type": "OtherProcessor"}))
    with pytest.raises(OmnifleetError) as caught:
        read_video_processor(tmp_path)
    assert caught.value.reason is Reason.UNSUPPORTED
