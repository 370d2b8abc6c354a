"""Bundles of lossless frames to clips: each frame is a picture file of its own, and none is sampled again."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_media.decode.picture import Pixels, decode_picture
from omnifleet_media.decode.sampling import check_length, prompt_clock
from omnifleet_media.ingest.frame_manifest import open_bundle
from omnifleet_media.ingest.sniff import sniff
from omnifleet_media.sandbox.frames import Header


def decode_bundle(header: Header, data: bytes) -> tuple[Header, Sequence[memoryview]]:
    """header: sampling, num_frames (0 = all), background; limits pixels, frames, seconds and bytes. Answers as of a clip.

    Raises OmnifleetError: INVALID_MEDIA if frames differ in size, INVALID_REQUEST if another number of them is asked
    for, LIMIT_EXCEEDED.
    """
    manifest, files = open_bundle(data)
    if len(files) > header["frames"]:
        raise OmnifleetError(
            Reason.LIMIT_EXCEEDED,
            f"the manifest names {len(files)} frames, at most {header['frames']} are allowed",
            knob="media.limits.frames",
        )
    if header["num_frames"] not in (0, len(files)):
        raise invalid(
            f"the manifest has {len(files)} frames and {header['num_frames']} are asked for; cached frames are "
            "not sampled again",
            knob="contract.num_frames",
        )
    seconds = [(i - manifest.frames_indices[0]) / manifest.fps for i in manifest.frames_indices]
    check_length(max(seconds) - min(seconds), header["seconds"])
    frames: list[Pixels] = []
    for file in files:
        pixels = decode_picture(file, sniff(file).codec, header["pixels"], header["background"])
        if frames and pixels.shape != frames[0].shape:
            raise OmnifleetError(
                Reason.INVALID_MEDIA,
                f"frames of one clip have one size, not {frames[0].shape[:2]} and {pixels.shape[:2]}",
            )
        if pixels.nbytes * len(files) > header["bytes"]:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"{len(files)} frames have {pixels.nbytes * len(files)} bytes, at most {header['bytes']} are allowed",
                knob="media.limits.decode_memory_bytes",
            )
        frames.append(pixels)
    stacked = np.stack(frames)
    by_prompt = header["sampling"].startswith("nemotron_vl")
    answer = {
        "frames": len(frames),
        "shape": list(stacked.shape[1:]),
        "timestamps_s": prompt_clock(manifest.frames_indices, manifest.fps) if by_prompt else seconds,
        "facts": {
            "total_frames": str(manifest.total_num_frames),
            "fps": f"{manifest.fps:.9g}",
            "indices": ",".join(map(str, manifest.frames_indices)),
        },
    }
    return answer, [stacked.data.cast("B")]
