"""Runs one processor on canonical pixels, or on a canonical track. Runs in a processor process (role "segments")."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.processor import SOUND_PROCESSOR
from omnifleet.sounds import sound_tokens
from omnifleet.types import MediaKind
from omnifleet_media.sandbox.frames import Header, Room
from omnifleet_media.segment.sound import features_of

Pixels = npt.NDArray[np.uint8]

OPENS_FILES = True
"""transformers imports its processors when they are first asked for."""
_KEEP = 8  # built processors, by class and config
_built: dict[tuple[str, str], Any] = {}


def prepare() -> Header:
    """Import torch and transformers; one thread each, since processes are the unit of parallelism."""
    import torch
    import transformers
    from transformers import Qwen2VLImageProcessor, Qwen2VLVideoProcessor  # noqa: F401  (loads torchvision too)

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    return {"library": f"transformers {transformers.__version__}"}


def takes_clips(class_name: str) -> bool:
    """True for the processors of clips; transformers names them so."""
    return class_name.endswith("VideoProcessor")


def kind_of(class_name: str) -> MediaKind:
    """What a processor takes."""
    if class_name == SOUND_PROCESSOR:
        return MediaKind.AUDIO
    return MediaKind.VIDEO if takes_clips(class_name) else MediaKind.IMAGE


def work(header: Header, body: bytearray, room: Room) -> tuple[Header, Sequence[bytes]]:
    """header: class_name, config, config_json, shape [F, H, W, 3] (F = 1 for pictures), of a track [samples, rate]. Answers
    token_count, grid (of a track pieces, frames, bands) and a safetensors file."""
    if header["class_name"] == SOUND_PROCESSOR:
        return _heard(np.frombuffer(body, "<f4"), int(header["shape"][1]), header["config"])
    frames = np.frombuffer(body, np.uint8).reshape(header["shape"])
    class_name = header["class_name"]
    processor = _processor(class_name, header["config_json"], header["config"])
    try:
        output = _run(processor, frames, clip=takes_clips(class_name))
    except (ValueError, TypeError, KeyError, RuntimeError) as error:
        # Deterministic and about this picture and this config (e.g. an aspect ratio beyond the family's limit).
        height, width = frames.shape[1:3]
        raise invalid(f"{class_name} refuses {width} x {height} pixels: {error}") from error
    return _packed(processor, output, class_name, header["config"])


def _heard(
    samples: npt.NDArray[np.float32], rate: int, config: Mapping[str, Any]
) -> tuple[Header, Sequence[bytes]]:
    from safetensors.torch import save

    try:
        if rate != config["sampling_rate"]:
            raise invalid(
                f"the track has {rate} samples a second, the model hears {config['sampling_rate']}",
                knob="contract.sample_rate",
            )
        tensors, count = features_of(samples, config), sound_tokens(config, len(samples))
    except (ValueError, TypeError, KeyError, RuntimeError, ZeroDivisionError) as error:
        raise invalid(f"{SOUND_PROCESSOR} refuses {len(samples)} samples: {error!r}") from error
    return {"token_count": count, "grid": list(tensors["input_features"].shape)}, [save(tensors)]


def _run(processor: Any, frames: Pixels, *, clip: bool) -> Any:
    from PIL import Image

    if clip:  # sampled already, under the decode contract
        return processor(videos=[frames.copy()], do_sample_frames=False, return_tensors="pt")
    return processor(images=[Image.fromarray(frames[0])], return_tensors="pt")


def _packed(
    processor: Any, output: Any, class_name: str, config: Mapping[str, Any]
) -> tuple[Header, Sequence[bytes]]:
    from safetensors.torch import save

    if "image_grid_thw" in output:
        tensors, merge = _of_qwen(output, "image_grid_thw", "pixel_values"), int(processor.merge_size)
        grid = tensors["image_grid_thw"][0].tolist()
    elif "video_grid_thw" in output:
        tensors, merge = _of_qwen(output, "video_grid_thw", "pixel_values_videos"), int(processor.merge_size)
        grid = tensors["video_grid_thw"][0].tolist()
    elif "image_grid_hw" in output:
        tensors, merge = _of_nemotron_picture(output), round(1 / processor.downsample_ratio)
        grid = [1, *tensors["image_grid_hw"][0].tolist()]
    elif "num_tokens" in output:
        temporal_patch = int(config.get("temporal_patch_size") or 2)
        tensors, merge = (
            _of_nemotron_clip(processor, output, temporal_patch),
            round(1 / processor.downsample_ratio),
        )
        grid = tensors["video_grid_thw"][0].tolist()
    else:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"{class_name} answers {', '.join(output)}: its tokens can't be counted from that",
        )
    t, h, w = grid
    return {"token_count": t * (h // merge) * (w // merge), "grid": grid}, [save(tensors)]


def _of_qwen(output: Any, grid: str, pixels: str) -> dict[str, Any]:
    """Patches float32 [t h w, patch values], grid int64 [1, 3]."""
    import torch

    return {
        grid: output[grid].to(torch.int64).contiguous(),
        pixels: output[pixels].to(torch.float32).contiguous(),
    }


def _of_nemotron_picture(output: Any) -> dict[str, Any]:
    """Patches float32 [h w, patch values], grid int64 [1, 2]."""
    import torch

    return {
        "image_grid_hw": output["image_grid_hw"].to(torch.int64).contiguous(),
        "pixel_values": output["pixel_values"].to(torch.float32).contiguous(),
    }


def _of_nemotron_clip(processor: Any, output: Any, temporal_patch: int) -> dict[str, Any]:
    """Tiles float32 [F, 3, H, W], imgs_sizes int32 [F, 2] as (H, W), num_frames int32 [1], video_grid_thw int64 [1, 3]."""
    import torch

    tiles = output["pixel_values_videos"].to(torch.float32).contiguous()
    frames, _, height, width = tiles.shape
    patch = int(processor.patch_size)
    grid = [-(-frames // temporal_patch), height // patch, width // patch]
    return {
        "imgs_sizes": torch.tensor([[height, width]] * frames, dtype=torch.int32),
        "num_frames": torch.tensor([frames], dtype=torch.int32),
        "pixel_values_videos": tiles,
        "video_grid_thw": torch.tensor([grid], dtype=torch.int64),
    }


def _processor(class_name: str, config_json: str, config: dict[str, Any]) -> Any:
    key = (class_name, config_json)
    if key not in _built:
        import transformers

        if len(_built) >= _KEEP:
            _built.pop(next(iter(_built)))
        try:
            _built[key] = getattr(transformers, class_name).from_dict(dict(config))
        except (AttributeError, ValueError, TypeError, KeyError) as error:
            raise invalid(f"{class_name} can't be built from this config: {error}") from error
    return _built[key]


def library() -> str:
    """Name and version of the library that makes segments. Raises OmnifleetError(UNSUPPORTED) if it is not installed."""
    try:
        return f"transformers {importlib.metadata.version('transformers')}"
    except importlib.metadata.PackageNotFoundError:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            "segments need transformers and torch here",
            knob="pip install 'omnifleet-media[segments]'",
        ) from None
