"""Media processors by content: what a checkpoint says about its own, without the library that runs them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.address import canonical_json
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.model_files import bracket_ids, read_json, read_model_config
from omnifleet.prompt import NO_BRACKETS, Brackets
from omnifleet.sounds import read_sound_config

_NOT_SEMANTIC = frozenset(
    {
        "image_processor_type",
        "video_processor_type",
        "feature_extractor_type",
        "processor_class",
        "auto_map",
        "transformers_version",
        "name_or_path",
        "return_tensors",
    }
)
_PATH_ENDINGS = ("_path", "_dir", "_file", "_folder")
# Frames are sampled under a decode contract; what a processor would sample itself changes nothing.
_SAMPLING = frozenset(
    {"do_sample_frames", "num_frames", "fps", "min_frames", "max_frames", "return_metadata", "video_metadata"}
)
_IMAGE_PLACEHOLDERS = ("image_token_id", "image_token_index", "img_context_token_id")
_VIDEO_PLACEHOLDERS = ("video_token_id", "video_token_index", "video_context_token_id")
SOUND_PROCESSOR = "ParakeetFeatureExtractor"
"""Class of what makes mel features of sounds, by transformers' name."""
_SOUND_SETTINGS: dict[str, int | float] = {
    "hop_length": 160,
    "n_fft": 512,
    "win_length": 400,
    "preemphasis": 0.97,
    "subsampling_factor": 8,
    "subsampling_conv_kernel_size": 3,
    "subsampling_conv_stride": 2,
}
"""The engine's, where a checkpoint says nothing."""
_CLIPS_OF = {
    "Qwen2VLImageProcessor": "Qwen2VLVideoProcessor",
    "Qwen2VLImageProcessorPil": "Qwen2VLVideoProcessor",
    "NemotronH_Omni_Reasoning_V3ImageProcessor": "NemotronH_Omni_Reasoning_V3VideoProcessor",
}


_BRACKETED = frozenset(
    {
        "NemotronH_Nano_VL_V2",
        "NemotronH_Nano_Omni_Reasoning_V3",
        "NemotronH_Super_Omni_Reasoning_V3",
        "NemotronH_Omni_Reasoning_V3",
        "nemotron_h_omni",
    }
)
_BRACKETS = ("<img>", "</img>")
_CLIP_SETTINGS = {
    "NemotronH_Omni_Reasoning_V3VideoProcessor": frozenset(
        {
            "video_target_num_patches",
            "video_maintain_aspect_ratio",
            "temporal_patch_size",
            "patch_size",
            "downsample_ratio",
        }
    ),
    "Qwen2VLVideoProcessor": frozenset({"min_pixels", "max_pixels"}),
}
"""Settings that a class has although a checkpoint's file may leave them out."""


@dataclass(frozen=True, slots=True)
class ProcessorSpec:
    """A processor class and the settings that change its output; no path, no version of a library."""

    class_name: str
    config: dict[str, Any]

    @property
    def config_json(self) -> str:
        """Canonical JSON of `config`: the form that goes over the wire and into fingerprints."""
        return canonical_json(self.config).decode()

    @property
    def temporal_patch(self) -> int:
        """Frames that one temporal patch packs; what a clip's decode contract should ask for."""
        return int(self.config.get("temporal_patch_size") or self.config.get("video_temporal_patch_dim") or 2)


ImageProcessorSpec = ProcessorSpec


def read_image_processor(model_dir: Path) -> ProcessorSpec:
    """The image processor of a Hugging Face checkpoint folder.

    Reads preprocessor_config.json, or the `image_processor` part of processor_config.json. Path-like keys and keys
    that change no pixel are dropped, so that equal processors of different checkpoints are equal.
    Raises OmnifleetError(MODEL_MISSING) if the folder has neither file, INVALID_CONFIG if it is malformed.
    """
    body = _image_processor_body(model_dir)
    class_name = body.get("image_processor_type") or body.get("feature_extractor_type")
    if not isinstance(class_name, str):
        raise invalid(
            f"{model_dir}: the image processor has no image_processor_type", reason=Reason.INVALID_CONFIG
        )
    config = {key: value for key, value in body.items() if _changes_pixels(key)}
    # Checkpoints of transformers 4 name the torch class by this suffix; 5 dropped it.
    return ProcessorSpec(class_name.removesuffix("Fast"), config)


def read_video_processor(
    model_dir: Path, changes: Mapping[str, bool | int | float] | None = None
) -> ProcessorSpec:
    """The processor of clips of a Hugging Face checkpoint folder, without its own sampling of frames.

    changes: settings that win over the checkpoint's (`rollout.engine.clips`); of Nemotron Omni also `temporal_patch_size`,
    `video_target_num_patches` and `video_maintain_aspect_ratio`, which its files leave out.

    Reads video_preprocessor_config.json, or the `video_processor` part of processor_config.json; older checkpoints have
    neither, and their clips go by the settings of pictures. Raises as `read_image_processor`, and UNSUPPORTED if the
    family takes no clips.
    """
    body = read_json(model_dir / "video_preprocessor_config.json")
    if body is None:
        nested = (read_json(model_dir / "processor_config.json") or {}).get("video_processor")
        body = nested if isinstance(nested, dict) else None
    if body is None:
        return _changed(_clips_like_pictures(model_dir), changes or {})
    class_name = body.get("video_processor_type")
    if not isinstance(class_name, str):
        raise invalid(
            f"{model_dir}: the video processor has no video_processor_type", reason=Reason.INVALID_CONFIG
        )
    return _changed(ProcessorSpec(class_name, _of_clips(body)), changes or {})


def read_sound_processor(model_dir: Path) -> ProcessorSpec:
    """What makes mel features of sounds, by the encoder of sounds in config.json. Raises as `read_sound_config`."""
    encoder = read_sound_config(model_dir)
    settings = {name: encoder.get(name, value) for name, value in _SOUND_SETTINGS.items()}
    sizes = {"feature_size": encoder["num_mel_bins"], "sampling_rate": encoder["sampling_rate"]}
    return ProcessorSpec(SOUND_PROCESSOR, settings | sizes)


def image_token_id(model_dir: Path) -> int:
    """Id of the placeholder token that stands for an image feature, from config.json.

    Raises OmnifleetError(MODEL_MISSING) without the file, INVALID_CONFIG if the model has no such token.
    """
    return _token_id(model_dir, _IMAGE_PLACEHOLDERS, "image")


def video_token_id(model_dir: Path) -> int:
    """Id of the placeholder token that stands for a feature of a clip; raises as `image_token_id`.

    Families without one of their own write clips with the image token.
    """
    return _token_id(model_dir, (*_VIDEO_PLACEHOLDERS, *_IMAGE_PLACEHOLDERS), "video")


def picture_brackets(model_dir: Path) -> Brackets:
    """Tokens around the features of every picture: those of Nemotron Omni, whose chat template writes `<image>` alone.

    Raises OmnifleetError(MODEL_MISSING) without config.json, INVALID_CONFIG if the tokenizer lacks one of them.
    """
    config = read_model_config(model_dir)
    if not _BRACKETED & {*(config.get("architectures") or ()), config.get("model_type")}:
        return NO_BRACKETS
    return bracket_ids(model_dir, _BRACKETS)


def _token_id(model_dir: Path, names: tuple[str, ...], kind: str) -> int:
    config = read_model_config(model_dir)
    for name in names:
        if isinstance(config.get(name), int):
            return int(config[name])
    raise invalid(
        f"{model_dir / 'config.json'} names no {kind} token ({', '.join(names)})",
        reason=Reason.INVALID_CONFIG,
    )


def _clips_like_pictures(model_dir: Path) -> ProcessorSpec:
    pictures = read_image_processor(model_dir)
    class_name = _CLIPS_OF.get(pictures.class_name)
    if class_name is None:
        raise OmnifleetError(
            Reason.UNSUPPORTED, f"{model_dir}: no video processor is known beside {pictures.class_name}"
        )
    return ProcessorSpec(class_name, _of_clips(pictures.config))


def _changed(spec: ProcessorSpec, changes: Mapping[str, bool | int | float]) -> ProcessorSpec:
    """The spec with other settings; one that its family does not know would change nothing, and is refused."""
    known = set(spec.config) | _CLIP_SETTINGS.get(spec.class_name, frozenset())
    for name in changes:
        if name not in known:
            raise invalid(
                f"{spec.class_name} has no setting {name!r}; it has {', '.join(sorted(known))}",
                knob=f"rollout.engine.clips.{name}",
                reason=Reason.INVALID_CONFIG,
            )
    return ProcessorSpec(spec.class_name, {**spec.config, **changes})


def _of_clips(body: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in body.items() if _changes_pixels(key) and key not in _SAMPLING}


def _image_processor_body(model_dir: Path) -> dict[str, Any]:
    body = read_json(model_dir / "preprocessor_config.json")
    if body is not None:
        return body
    nested = (read_json(model_dir / "processor_config.json") or {}).get("image_processor")
    if isinstance(nested, dict):
        return nested
    raise OmnifleetError(
        Reason.MODEL_MISSING,
        f"{model_dir} has neither preprocessor_config.json nor an image processor in processor_config.json",
        knob="model.path",
    )


def _changes_pixels(key: str) -> bool:
    return key not in _NOT_SEMANTIC and not key.startswith("_") and not key.endswith(_PATH_ENDINGS)
