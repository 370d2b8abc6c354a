"""Nemotron Omni into vLLM: our segments against vLLM's own processor and the parser of its model. No engine runs here."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import BatchFeature, NemotronH_Omni_Reasoning_V3ImageProcessor

from omnifleet.client.media import Segment
from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import image_token_id, video_token_id
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_rollout.engine.vllm_media import Item, PromptMedia
from omnifleet_rollout.engine.vllm_nemotron import clip_inputs, picture_inputs
from omnifleet_trainer.tiny.hybrid import write_hybrid

pytestmark = pytest.mark.heavy

ARCHITECTURE = "NemotronH_Nano_Omni_Reasoning_V3"
FRAMES, ROWS, COLUMNS, PATCH = 5, 4, 6, 16
TIMES = (0.0, 0.198, 0.429, 0.627, 0.858)  # frames 0, 6, 13, 19, 26 of 33 ms each
PICTURE, CLIP = (
    MediaRef(kind, Digest(c * 64)) for kind, c in ((MediaKind.IMAGE, "a"), (MediaKind.VIDEO, "b"))
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("omni") / "model"
    write_hybrid(out)
    return out


def picture_segment(model: Path) -> dict[str, Any]:
    """As the media service makes it, by transformers' processor."""
    noise = np.random.default_rng(0).integers(0, 256, (70, 110, 3), np.uint8)
    made = NemotronH_Omni_Reasoning_V3ImageProcessor.from_pretrained(model)(
        images=[Image.fromarray(noise)], return_tensors="pt"
    )
    return {name: made[name].numpy() for name in ("pixel_values", "image_grid_hw")}


def clip_segment() -> dict[str, Any]:
    tiles = np.random.default_rng(1).normal(size=(FRAMES, 3, ROWS * PATCH, COLUMNS * PATCH))
    return {
        "pixel_values_videos": tiles.astype(np.float32),
        "video_grid_thw": np.array([[-(-FRAMES // 2), ROWS, COLUMNS]]),
    }


def kwargs_of(modality: str, *inputs: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's model gets of several items in one step: through its field config, items, and batching."""
    from vllm.model_executor.models.nano_nemotron_vl import NanoNemotronVLMultiModalProcessor as Theirs
    from vllm.multimodal.inputs import MultiModalKwargsItems

    info = SimpleNamespace(is_dynamic_tiler=True, supports_video=True, supports_audio=False)
    vllm = SimpleNamespace(info=info)
    for name in ("_get_image_fields_config", "_get_video_fields_config"):
        setattr(vllm, name, getattr(Theirs, name).__get__(vllm))
    items = []
    for one in inputs:
        feature = BatchFeature(dict(one))
        fields = Theirs._get_mm_fields_config(vllm, feature, {})
        items.append(MultiModalKwargsItems.from_hf_inputs(feature, fields)[modality][0])
    batched: dict[str, Any] = MultiModalKwargsItems({modality: items}).get_data()
    return batched


def test_pictures_reach_the_model_as_its_own_processor_would_send_them(model: Path) -> None:
    from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2

    segment = picture_segment(model)
    rows, columns = segment["image_grid_hw"][0].tolist()
    one = picture_inputs(segment, rows * columns // 4, torch.float32)
    kwargs = kwargs_of("image", one, one)
    parsed = NemotronH_Nano_VL_V2._parse_and_validate_image_input(
        SimpleNamespace(dynamic_resolution=True, patch_size=PATCH), **kwargs
    )
    patches = torch.from_numpy(segment["pixel_values"])
    assert torch.equal(parsed.pixel_values_flat, torch.cat([patches, patches])[None])
    assert [tuple(map(int, size)) for size in parsed.imgs_sizes] == [(rows * PATCH, columns * PATCH)] * 2
    assert [int(n) for n in parsed.num_tokens_per_image] == [rows * columns // 4] * 2


def test_clips_reach_the_model_with_the_times_of_their_frames() -> None:
    from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2
    from vllm.transformers_utils.processors.nano_nemotron_vl import calculate_timestamps

    segment = clip_segment()
    one = clip_inputs(segment, TIMES, torch.float32)
    parsed = NemotronH_Nano_VL_V2._parse_and_validate_video_input(
        SimpleNamespace(), **kwargs_of("video", one, one)
    )
    assert parsed["num_patches"].flatten().tolist() == [FRAMES, FRAMES]
    tiles = torch.from_numpy(segment["pixel_values_videos"])
    assert torch.equal(parsed["pixel_values_flat"], torch.cat([tiles, tiles]))
    for indices, duration in zip(
        parsed["frames_indices"].split([FRAMES, FRAMES]), parsed["frame_duration_ms"].tolist(), strict=True
    ):
        assert calculate_timestamps(indices, duration) == list(TIMES)
        assert calculate_timestamps([0, 6, 13, 19, 26], 33) == list(TIMES), (
            "what vLLM has at 30 frames a second"
        )


class Media(PromptMedia):
    """Segments from here instead of from a media service."""

    async def _segment(self, ref: MediaRef, run: str) -> Segment:
        tensors = clip_segment() if ref.kind is MediaKind.VIDEO else {}
        count = 3 * ROWS * COLUMNS // 4 if ref.kind is MediaKind.VIDEO else 7
        times = TIMES if ref.kind is MediaKind.VIDEO else ()
        digest = ref.digest
        return Segment(digest, digest, count, (1, 1, 1), tensors, 0, False, times)


def media_of(model: Path, architecture: str = ARCHITECTURE) -> Media:
    async def nowhere() -> str:
        raise AssertionError("no media service here")

    engine = EngineConfig(images_per_prompt=2, videos_per_prompt=2, dtype="float32")
    return Media(model, architecture, engine, find_media=nowhere, secret="")


async def test_a_clip_takes_the_positions_that_vllm_embeds(model: Path) -> None:
    from transformers import AutoTokenizer
    from vllm.transformers_utils.processors.nano_nemotron_vl import NanoNemotronVLProcessor

    tokenizer = AutoTokenizer.from_pretrained(model)
    start, end = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in ("<img>", "</img>"))
    image, video = image_token_id(model), video_token_id(model)
    theirs = NanoNemotronVLProcessor.get_video_repl(
        tokens_per_frame=[ROWS * COLUMNS // 4] * 3,
        frames_indices=[0, 6, 13, 19, 26],
        frame_duration_ms=33,
        tokenizer=tokenizer,
        img_start_token_ids=start,
        img_end_token_ids=end,
        img_context_token_ids=[image],
        video_temporal_patch_size=2,
    )
    prompt = await media_of(model).prepare([40, video, 41, image, 42], [CLIP, PICTURE], "")
    clip, picture = prompt.media
    assert prompt.token_ids == [40, *theirs.full, 41, *start, *[image] * 7, *end, 42]
    assert (clip.offset, clip.length) == (1, len(theirs.full)), "the encoder embeds the words too"
    assert prompt.token_ids[picture.offset : picture.offset + picture.length] == [image] * 7


@pytest.mark.parametrize("ids", ["image image", "video", "video image image"])
async def test_a_wrong_number_of_placeholders_is_refused(model: Path, ids: str) -> None:
    tokens = {"image": image_token_id(model), "video": video_token_id(model)}
    with pytest.raises(OmnifleetError) as refused:
        await media_of(model).prepare([40, *(tokens[name] for name in ids.split())], [CLIP, PICTURE], "")
    assert refused.value.reason is Reason.INVALID_REQUEST


def test_fixed_tiles_are_refused_at_start(model: Path, tmp_path: Path) -> None:
    for file in model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["vision_config"]["args"].pop("min_num_patches")
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(OmnifleetError) as refused:
        media_of(tmp_path)
    assert refused.value.reason is Reason.UNSUPPORTED and refused.value.knob == "model.path"


@pytest.mark.parametrize("ref", [PICTURE, CLIP])
def test_the_tower_gets_its_own_type_from_an_engine_of_another(model: Path, ref: MediaRef) -> None:
    """float32 pixels before a bfloat16 tower end vLLM's engine."""
    segment = Segment(ref.digest, ref.digest, 6, (1, 1, 1), _tensors_of(model, ref), 0, False, TIMES)
    inputs = media_of(model)._nemotron_inputs(Item(ref.kind, segment, 0, 6))
    pixels = inputs["pixel_values_flat"][0] if ref is PICTURE else inputs["pixel_values_flat_video"]
    assert pixels.dtype is torch.bfloat16


def _tensors_of(model: Path, ref: MediaRef) -> dict[str, Any]:
    return picture_segment(model) if ref is PICTURE else clip_segment()


async def test_sounds_are_refused_by_name(model: Path) -> None:
    sound = MediaRef(MediaKind.AUDIO, Digest("c" * 64))
    with pytest.raises(OmnifleetError, match="takes no audio") as refused:
        await media_of(model).prepare([40, 41], [sound], "")
    assert refused.value.reason is Reason.UNSUPPORTED
