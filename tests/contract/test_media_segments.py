"""Model-ready segments: equal to what transformers makes, made once, mapped."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import transformers

from omnifleet.address import processor_fingerprint, segment_key
from omnifleet.client.media import MediaClient, read_tensors
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import ImageProcessorSpec, ProcessorSpec, image_token_id, read_image_processor
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet.vision_grid import nemotron_clip_grid, qwen2vl_grid
from omnifleet.wire import media_pb2
from tests.contract.media_world import png, running, served
from tests.media_files import greys, h264

CONFIG = {
    "patch_size": 14,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 28 * 28, "longest_edge": 28 * 28 * 64},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
SPEC = ImageProcessorSpec("Qwen2VLImageProcessor", CONFIG)
PROCESSORS = (
    "Qwen2VLImageProcessor",
    "Qwen2VLImageProcessorPil",
    "Qwen2VLVideoProcessor",
    "NemotronH_Omni_Reasoning_V3VideoProcessor",
)


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[str]:
    async with running(tmp_path, processors=PROCESSORS) as made:
        yield made.grpc


async def test_segments_of_the_service(service: str) -> None:
    """One service for all of it, since its processor process takes seconds to start."""
    async with MediaClient.open(service) as near, MediaClient.open(service, same_host=False) as far:
        await is_what_transformers_makes(near)
        await is_made_once(near, far)
        await is_the_same_for_clips(near, far)
        await is_refused_in_words(near)


async def is_what_transformers_makes(client: MediaClient) -> None:
    for class_name in PROCESSORS[:2]:
        for seed, size in enumerate([(160, 120), (33, 97), (448, 448)]):
            data = png(seed, size)
            segment = await client.segment(
                await client.put_image(data, "run"), ImageProcessorSpec(class_name, CONFIG), "run"
            )
            from PIL import Image

            picture = Image.fromarray(np.array(await client.frame(await client.put_image(data, "run"))))
            made = getattr(transformers, class_name).from_dict(dict(CONFIG))(
                images=[picture], return_tensors="np"
            )
            assert (segment.tensors["pixel_values"] == made["pixel_values"]).all()
            assert segment.tensors["image_grid_thw"].tolist() == made["image_grid_thw"].tolist()
            assert segment.grid == tuple(made["image_grid_thw"][0])
            assert segment.token_count == int(np.prod(segment.grid)) // 4
            assert segment.mapped
            assert not segment.tensors["pixel_values"].flags.writeable


async def is_made_once(near: MediaClient, far: MediaClient) -> None:
    before = (await near.status()).counters
    ref = await near.put_image(png(99, (90, 60)), "run")
    segments = await asyncio.gather(
        *(client.segment(ref, SPEC, "run") for client in (near, far) for _ in range(8))
    )
    again = await near.segment(ref, SPEC, "run")
    after = (await near.status()).counters
    assert after["segments_computed"] - before["segments_computed"] == 1
    assert (
        after["segments_served"] - before["segments_served"] == 2
    )  # one a client: the rest shared its request
    assert again is segments[0]
    library = f"transformers {transformers.__version__}"
    fingerprint = processor_fingerprint(SPEC.class_name, CONFIG, library)
    assert {s.key for s in segments} == {segment_key(ref.digest, fingerprint)}
    streamed = segments[-1]
    assert not streamed.mapped
    assert (streamed.tensors["pixel_values"] == again.tensors["pixel_values"]).all()


async def is_the_same_for_clips(near: MediaClient, far: MediaClient) -> None:
    contract = media_pb2.DecodeContract(sampling="nemotron_vl@1", num_frames=5, temporal_patch=2)
    reply = await near.put(h264(greys(24)), "run", kind=MediaKind.VIDEO, contract=contract)
    ref = MediaRef(MediaKind.VIDEO, Digest(reply.ref.digest))
    frames = np.stack(await near.frames(ref))
    before = (await near.status()).counters["segments_computed"]
    qwen, nemotron = (
        ProcessorSpec("Qwen2VLVideoProcessor", CONFIG),
        ProcessorSpec(
            "NemotronH_Omni_Reasoning_V3VideoProcessor",
            {"norm_mean": [0.5] * 3, "norm_std": [0.5] * 3, "video_target_num_patches": 64},
        ),
    )
    for spec, grid in ((qwen, qwen2vl_grid), (nemotron, nemotron_clip_grid)):
        mapped, streamed = [await client.segment(ref, spec, "run") for client in (near, far)]
        made = getattr(transformers, spec.class_name).from_dict(dict(spec.config))(
            videos=[frames], do_sample_frames=False, return_tensors="np"
        )
        for segment in (mapped, streamed):
            assert (segment.tensors["pixel_values_videos"] == made["pixel_values_videos"]).all()
            expected = grid(spec.config, 48, 64, len(frames))
            assert segment.grid == (expected.t, expected.h, expected.w)
            assert segment.token_count == expected.tokens
            assert segment.times_s == (await near.info(ref)).timestamps_s[:: spec.temporal_patch]
            assert len(segment.times_s) == segment.grid[0]  # vid_15
        library = f"transformers {transformers.__version__}"
        fingerprint = processor_fingerprint(spec.class_name, spec.config, library, "sampled")
        assert mapped.key == streamed.key == segment_key(ref.digest, fingerprint)
    assert (await near.status()).counters["segments_computed"] - before == 2
    for asked, spec in ((ref, SPEC), (await near.put_image(png(), "run"), qwen)):
        with pytest.raises(OmnifleetError, match="takes media of kind") as caught:
            await near.segment(asked, spec, "run")
        assert caught.value.reason is Reason.UNSUPPORTED


async def is_refused_in_words(client: MediaClient) -> None:
    ref = await client.put_image(png(), "run")
    bad = {
        Reason.UNSUPPORTED: (ref, ImageProcessorSpec("AutoImageProcessor", {})),
        Reason.INVALID_REQUEST: (ref, ImageProcessorSpec("Qwen2VLImageProcessor", {"size": {"height": 1}})),
        Reason.NOT_FOUND: (MediaRef(MediaKind.IMAGE, Digest("ab" * 32)), SPEC),
    }
    for reason, (asked, spec) in bad.items():
        with pytest.raises(OmnifleetError) as caught:
            await client.segment(asked, spec, "run")
        assert caught.value.reason is reason
    thin = await client.put_image(png(0, (201, 1)), "run")
    with pytest.raises(OmnifleetError, match="200") as caught:  # img_16: the ratio is named
        await client.segment(thin, SPEC, "run")
    assert caught.value.reason is Reason.INVALID_REQUEST
    await client.segment(await client.put_image(png(1, (200, 1)), "run"), SPEC, "run")


async def test_segments_outlive_a_restart_and_are_checked(tmp_path: Path) -> None:
    async with served(tmp_path, processors=PROCESSORS) as client:
        ref = await client.put_image(png(0, (60, 60)), "run")
        first = await client.segment(ref, SPEC, "run")
    async with served(tmp_path, processors=PROCESSORS) as client:
        second = await client.segment(ref, SPEC, "run")
        assert (await client.status()).counters["segments_computed"] == 0
    assert second.key == first.key
    assert (second.tensors["pixel_values"] == first.tensors["pixel_values"]).all()


def test_the_spec_of_a_checkpoint_has_no_path_and_no_version(tmp_path: Path) -> None:
    body = {
        **CONFIG,
        "image_processor_type": "Qwen2VLImageProcessorFast",
        "processor_class": "Qwen2VLProcessor",
        "name_or_path": "/somewhere/model",
        "_processor_class": None,
        "transformers_version": "4.57",
        "auto_map": {"AutoImageProcessor": "x.Y"},
    }
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(body))
    (tmp_path / "config.json").write_text(json.dumps({"image_token_id": 262}))
    assert read_image_processor(tmp_path) == SPEC
    assert image_token_id(tmp_path) == 262


def test_a_checkpoint_of_one_processor_file(tmp_path: Path) -> None:
    body = {"image_processor": {"image_processor_type": "Qwen2VLImageProcessor", **CONFIG}}
    (tmp_path / "processor_config.json").write_text(json.dumps(body))
    assert read_image_processor(tmp_path) == SPEC


def test_a_folder_without_a_processor_is_named(tmp_path: Path) -> None:
    for read in (read_image_processor, image_token_id):
        with pytest.raises(OmnifleetError) as caught:
            read(tmp_path)
        assert caught.value.reason is Reason.MODEL_MISSING
        assert str(tmp_path) in caught.value.message


def test_tensors_are_views_of_the_buffer() -> None:
    from safetensors.numpy import save

    data = memoryview(save({"b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.array([[1, 2]])}))
    tensors = read_tensors(data)
    assert tensors["b"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert np.shares_memory(tensors["b"], np.frombuffer(data, np.uint8))
    with pytest.raises(OmnifleetError) as caught:
        read_tensors(data[:20])
    assert caught.value.reason is Reason.CORRUPT
