"""Sounds into vLLM: our expansion, features and items against vLLM's own processor and model. No engine runs here."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    BatchFeature,
    NemotronH_Omni_Reasoning_V3Processor,
    ParakeetEncoder,
    PreTrainedConfig,
)

from omnifleet.client.media import MediaInfo
from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import image_token_id, picture_brackets
from omnifleet.sounds import read_sound_config, sound_brackets, sound_token_id, sound_tokens
from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_rollout.engine.vllm_launch import _limits
from omnifleet_rollout.engine.vllm_media import PromptMedia
from omnifleet_rollout.engine.vllm_nemotron import picture_inputs, sound_inputs
from omnifleet_trainer.tiny.hybrid import write_hybrid

pytestmark = pytest.mark.heavy

ARCHITECTURE = "NemotronH_Nano_Omni_Reasoning_V3"
RATE = 16_000
LENGTHS = (1, 1599, 1600, 15_359, 15_360, 16_001, 479_999, 480_000, 480_001, 481_601, 960_000)
SHORT, LONG, OTHER_RATE = (MediaRef(MediaKind.AUDIO, Digest(c * 64)) for c in "abc")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("omni") / "model"
    write_hybrid(out, sound=True)
    return out


@pytest.fixture(scope="module")
def vllm(model: Path) -> Any:
    """vLLM's processor, as far as sounds go."""
    from transformers import AutoTokenizer
    from vllm.model_executor.models.parakeet import ParakeetExtractor
    from vllm.transformers_utils.processors.nano_nemotron_vl import NanoNemotronVLProcessor

    made = object.__new__(NanoNemotronVLProcessor)
    made.tokenizer = AutoTokenizer.from_pretrained(model)
    made.audio_extractor = ParakeetExtractor(PreTrainedConfig(**read_sound_config(model)))
    return made


def noise(samples: int, seed: int = 0) -> Any:
    return np.random.default_rng(seed).normal(0, 0.1, samples).astype(np.float32)


class Tracks:
    """A media service with three tracks; `asked` of each."""

    def __init__(self) -> None:
        self.tracks = {SHORT: noise(16_001), LONG: noise(481_601, 1), OTHER_RATE: noise(800)}
        self.asked: list[MediaRef] = []

    async def info(self, ref: MediaRef) -> MediaInfo:
        rate = 8_000 if ref == OTHER_RATE else RATE
        return MediaInfo(ref, (), (), 0, 0, 0, {}, samples=len(self.tracks[ref]), sample_rate=rate)

    async def track(self, ref: MediaRef) -> Any:
        self.asked.append(ref)
        await asyncio.sleep(0)
        return self.tracks[ref]


class Media(PromptMedia):
    """Talks to `Tracks` instead of to a media service."""

    tracks: Tracks

    async def _media(self) -> Any:
        return self.tracks


def media_of(model: Path, *, longest: int = 2048, sounds: int = 2, pictures: int = 2) -> Media:
    async def nowhere() -> str:
        raise AssertionError("no media service here")

    engine = EngineConfig(
        images_per_prompt=pictures, sounds_per_prompt=sounds, dtype="float32", max_model_len=longest
    )
    made = Media(model, ARCHITECTURE, engine, find_media=nowhere, secret="")
    made.tracks = Tracks()
    return made


@pytest.mark.parametrize("samples", LENGTHS)
def test_a_sound_has_the_tokens_that_vllm_gives_it(model: Path, vllm: Any, samples: int) -> None:
    count = sound_tokens(read_sound_config(model), samples)
    (before, after), token = sound_brackets(model), sound_token_id(model)
    assert list(vllm.get_audio_repl(np.zeros(samples, np.float32)).full) == [
        *before,
        *[token] * count,
        *after,
    ]


@pytest.mark.parametrize("samples", [n for n in LENGTHS if 1600 <= n <= 480_000])
def test_transformers_counts_a_frame_more(model: Path, samples: int) -> None:
    """Which is a token more at a multiple of eight frames; its model has a feature for it, of silence behind the end."""
    theirs = object.__new__(NemotronH_Omni_Reasoning_V3Processor)
    theirs.audio_hop_length, theirs.audio_subsampling_factor = 160, 8
    ours = sound_tokens(read_sound_config(model), samples)
    assert theirs._estimate_audio_num_embeddings(samples) == ours + (samples // 160 % 8 == 0)


async def test_prompts_and_features_are_those_of_vllm(model: Path, vllm: Any) -> None:
    """Two sounds of different lengths in one batch of vLLM's encoder: each gets as many features as it has places."""
    from vllm.model_executor.models.nano_nemotron_vl import NanoNemotronVLMultiModalProcessor as Theirs
    from vllm.model_executor.models.nano_nemotron_vl import NemotronH_Nano_VL_V2
    from vllm.multimodal.inputs import MultiModalKwargsItems

    media, token = media_of(model), sound_token_id(model)
    prompt = await media.prepare([40, token, 41, token, 42], [SHORT, LONG], "")
    expected = [list(vllm.get_audio_repl(media.tracks.tracks[ref]).full) for ref in (SHORT, LONG)]
    assert prompt.token_ids == [40, *expected[0], 41, *expected[1], 42]
    for item in prompt.media:
        assert prompt.token_ids[item.offset : item.offset + item.length] == [token] * item.length
        assert prompt.token_ids[item.offset - 1] == sound_brackets(model)[0][0]
    assert len({item.segment.key for item in prompt.media}) == 2 and len(set(prompt.fingerprints)) == 1

    with torch.compiler.set_stance("force_eager"):
        both = vllm.audio_extractor([media.tracks.tracks[ref] for ref in (SHORT, LONG)])
    fields_of = SimpleNamespace(
        info=SimpleNamespace(is_dynamic_tiler=True, supports_video=True, supports_audio=True)
    )
    for name in ("_get_image_fields_config", "_get_video_fields_config", "_get_audio_fields_config"):
        setattr(fields_of, name, getattr(Theirs, name).__get__(fields_of))
    items = []
    for item in prompt.media:
        feature = BatchFeature(sound_inputs(item.segment.tensors))
        fields = Theirs._get_mm_fields_config(fields_of, feature, {})
        items.append(MultiModalKwargsItems.from_hf_inputs(feature, fields)["audio"][0])
    batched = MultiModalKwargsItems({"audio": items}).get_data()
    assert batched["audio_num_clips"].flatten().tolist() == both["audio_num_clips"] == [1, 2]
    assert torch.equal(batched["feature_attention_mask"], both["feature_attention_mask"])
    assert torch.allclose(batched["input_audio_features"], both["input_audio_features"], atol=1e-5)

    class Encoder:
        """Parakeet, but for its arithmetic: a feature for each eight frames, of padding too."""

        encoder = SimpleNamespace(config=PreTrainedConfig(**read_sound_config(model)))

        def parameters(self) -> Any:
            return iter([torch.zeros(1)])

        def __call__(self, features: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            return torch.zeros(len(features), -(-features.shape[1] // 8), 4)

    lengths = ParakeetEncoder._get_subsampling_output_length
    Encoder.encoder._get_subsampling_output_length = lengths.__get__(Encoder.encoder)
    made = NemotronH_Nano_VL_V2._process_audio_input(
        SimpleNamespace(sound_encoder=Encoder(), llm_dtype=torch.float32),
        SimpleNamespace(**{**batched, "audio_num_clips": batched["audio_num_clips"].flatten()}),
    )
    assert [len(features) for features in made] == [item.length for item in prompt.media]


async def test_a_sound_is_made_once_however_many_ask(model: Path) -> None:
    media, token = media_of(model), sound_token_id(model)
    prompts = await asyncio.gather(*(media.prepare([token], [SHORT], "") for _ in range(4)))
    again = await media.prepare([token], [SHORT], "")
    assert media.tracks.asked == [SHORT]
    assert all(prompt.media[0].segment is again.media[0].segment for prompt in prompts)
    await media.close()


async def test_pictures_and_sounds_keep_their_own_brackets(model: Path) -> None:
    media, token, image = media_of(model), sound_token_id(model), image_token_id(model)
    segment = SimpleNamespace(token_count=7, key="k", fingerprint="f", tensors={}, times_s=())
    original = media._segment

    async def found(ref: MediaRef, run: str) -> Any:
        return segment if ref.kind is MediaKind.IMAGE else await original(ref, run)

    media._segment = found  # type: ignore[method-assign]
    picture = MediaRef(MediaKind.IMAGE, Digest("d" * 64))
    prompt = await media.prepare([image, 40, token], [picture, SHORT], "")
    (opens, closes), (starts, ends) = picture_brackets(model), sound_brackets(model)
    count = sound_tokens(read_sound_config(model), 16_001)
    assert prompt.token_ids == [*opens, *[image] * 7, *closes, 40, *starts, *[token] * count, *ends]
    assert token in media.tokens, "a model that writes it ends its reply"


@pytest.mark.parametrize(
    ("ref", "longest", "reason", "knob"),
    [
        (OTHER_RATE, 2048, Reason.INVALID_MEDIA, "contract.sample_rate"),
        (LONG, 256, Reason.PROMPT_TOO_LONG, "rollout.engine.max_model_len"),
    ],
)
async def test_what_cannot_be_heard_is_refused_before_its_samples_come(
    model: Path, ref: MediaRef, longest: int, reason: Reason, knob: str
) -> None:
    media = media_of(model, longest=longest)
    with pytest.raises(OmnifleetError) as refused:
        await media.prepare([sound_token_id(model)], [ref], "")
    assert (refused.value.reason, refused.value.knob) == (reason, knob) and media.tracks.asked == []


async def test_more_sounds_than_the_setting_allows_are_refused(model: Path) -> None:
    token = sound_token_id(model)
    with pytest.raises(OmnifleetError, match="2 audio items") as refused:
        await media_of(model, sounds=1).prepare([token, token], [SHORT, SHORT], "")
    assert refused.value.knob == "rollout.engine.sounds_per_prompt"
    with pytest.raises(OmnifleetError) as refused:
        await media_of(model, sounds=0).prepare([token], [SHORT], "")
    assert (refused.value.reason, refused.value.knob) == (
        Reason.UNSUPPORTED,
        "rollout.engine.sounds_per_prompt",
    )


def test_models_without_sounds_are_refused_at_start(tmp_path: Path, model: Path) -> None:
    write_hybrid(tmp_path / "deaf")
    for folder, architecture in (
        (tmp_path / "deaf", ARCHITECTURE),
        (model, "Qwen2VLForConditionalGeneration"),
    ):
        with pytest.raises(OmnifleetError) as refused:
            PromptMedia(
                folder,
                architecture,
                EngineConfig(sounds_per_prompt=1),
                find_media=lambda: asyncio.sleep(0, ""),
                secret="",
            )
        assert refused.value.reason is Reason.UNSUPPORTED


def test_an_encoder_in_float32_is_refused_before_it_ends_the_engine(model: Path, tmp_path: Path) -> None:
    for file in model.glob("*.json"):
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["dtype"] = "float32"
    (tmp_path / "config.json").write_text(json.dumps(config))
    for media, allowed in (("sounds", {"pictures": 0}), ("pictures and clips", {"sounds": 0})):
        with pytest.raises(OmnifleetError, match=f"{media} in bfloat16 only") as refused:
            media_of(tmp_path, **allowed)
        assert (refused.value.reason, refused.value.knob) == (Reason.UNSUPPORTED, "model.path")
    assert not media_of(tmp_path, sounds=0, pictures=0).takes_any


def test_a_picture_of_a_hearing_model_says_that_it_has_no_pieces_of_sound() -> None:
    """0.25.1 looks the number up in every item; none of it becomes a sound."""
    from vllm.model_executor.models.nano_nemotron_vl import NanoNemotronVLMultiModalProcessor as Theirs
    from vllm.multimodal.inputs import MultiModalKwargsItems

    segment = {"pixel_values": np.zeros((4, 768), np.float32), "image_grid_hw": np.array([[2, 2]])}
    feature = BatchFeature(picture_inputs(segment, 1, torch.float32))
    assert feature["audio_num_clips"].tolist() == []
    theirs = SimpleNamespace(info=SimpleNamespace(is_dynamic_tiler=True))
    fields = Theirs._get_image_fields_config(theirs, feature) | Theirs._get_audio_fields_config(
        theirs, feature
    )
    items = MultiModalKwargsItems.from_hf_inputs(feature, fields)
    assert len(items["image"]) == 1 and len(items.get("audio", ())) == 0


def test_vllm_is_told_the_limit_where_the_model_hears() -> None:
    engine = EngineConfig(sounds_per_prompt=3)
    assert _limits(engine, {"sound_config": {"sampling_rate": RATE}})["audio"] == 3
    assert "audio" not in _limits(engine, {})
