"""Frame manifests: clips that somebody has decoded already, as a list of lossless picture files.

The form is NeMo RL's: the line `NEMO_RL_CACHED_VIDEO_FRAMES_V1`, then compact JSON with `frame_paths` and `metadata`,
usually as a data URL of type `video/x-nemo-rl-cached-frames`. A manifest only names files; `bundle` puts their bytes
behind it, so that what is stored, hashed and decoded is the pictures and not a list of names that may change meaning.
"""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason

MIME = "video/x-nemo-rl-cached-frames"
MAGIC = b"NEMO_RL_CACHED_VIDEO_FRAMES_V1\n"
BUNDLE_MAGIC = b"omnifleet/frames/v1\n"
_BACKEND = "cached_png_sequence"
_MANIFEST_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class FrameManifest:
    """paths: absolute, one picture file a frame. frames_indices: of each in its source, whose rate is fps a second."""

    paths: tuple[str, ...]
    fps: float
    duration: float
    total_num_frames: int
    frames_indices: tuple[int, ...]

    @classmethod
    def of(cls, paths: Sequence[str | Path]) -> FrameManifest:
        """As the reference writes it: the source's timing is dropped, one second a frame.

        Raises OmnifleetError(INVALID_MEDIA) for no path or one that is not absolute.
        """
        count = len(paths)
        manifest = cls(tuple(str(p) for p in paths), 1.0, float(count), count, tuple(range(count)))
        _check_paths(list(manifest.paths))
        return manifest

    def encode(self) -> bytes:
        """Magic line and compact JSON."""
        body = {
            "frame_paths": list(self.paths),
            "metadata": {
                "fps": self.fps,
                "duration": self.duration,
                "total_num_frames": self.total_num_frames,
                "frames_indices": list(self.frames_indices),
                "video_backend": _BACKEND,
                "do_sample_frames": False,
            },
        }
        return MAGIC + json.dumps(body, separators=(",", ":")).encode()

    def data_url(self) -> str:
        """The form in which it stands in a request."""
        return f"data:{MIME};base64,{base64.b64encode(self.encode()).decode()}"

    @classmethod
    def parse(cls, data: bytes) -> FrameManifest:
        """Read and check a manifest. Raises OmnifleetError: INVALID_MEDIA, LIMIT_EXCEEDED."""
        if len(data) > _MANIFEST_BYTES:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the frame manifest has {len(data)} bytes, at most {_MANIFEST_BYTES} are allowed",
            )
        if not data.startswith(MAGIC):
            raise _broken(f"does not start with {MAGIC!r}")
        body = _object(data[len(MAGIC) :])
        paths: Any = body.get("frame_paths")
        metadata = body.get("metadata")
        _check_paths(paths)
        if not isinstance(metadata, dict):
            raise _broken("has no metadata object")
        return cls(tuple(paths), *_timing(metadata, len(paths)))


def bundle(manifest: FrameManifest, read: Callable[[str], bytes], limit: int) -> bytes:
    """The manifest and the bytes of its files in one: magic line, one line of JSON, then the files.

    read: the bytes of a path, if it may be read; what it raises is passed on. limit: most bytes of all files.
    Raises OmnifleetError(LIMIT_EXCEEDED).
    """
    files, total = [], 0
    for path in manifest.paths:
        files.append(read(path))
        total += len(files[-1])
        if total > limit:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED,
                f"the files of the frame manifest have more than {limit} bytes",
                knob="media.limits.source_bytes",
            )
    timing = [manifest.fps, manifest.duration, manifest.total_num_frames, list(manifest.frames_indices)]
    head = json.dumps({"sizes": [len(file) for file in files], "timing": timing}, separators=(",", ":"))
    return b"".join([BUNDLE_MAGIC, head.encode(), b"\n", *files])


def open_bundle(data: bytes) -> tuple[FrameManifest, list[memoryview]]:
    """Timing and files of a bundle; the manifest's paths are gone. Raises OmnifleetError(INVALID_MEDIA)."""
    end = data.find(b"\n", len(BUNDLE_MAGIC), len(BUNDLE_MAGIC) + _MANIFEST_BYTES)
    if not data.startswith(BUNDLE_MAGIC) or end < 0:
        raise _broken("is no bundle of frames")
    body = _object(data[len(BUNDLE_MAGIC) : end])
    sizes, timing = body.get("sizes"), body.get("timing")
    if not isinstance(sizes, list) or not sizes or not all(_is_count(size, 1) for size in sizes):
        raise _broken("has no sizes of its files")
    if not isinstance(timing, list) or len(timing) != 4:
        raise _broken("has no timing")
    if end + 1 + sum(sizes) != len(data):
        raise _broken("has another length than its files together")
    names = ("fps", "duration", "total_num_frames", "frames_indices")
    manifest = FrameManifest((), *_timing(dict(zip(names, timing, strict=True)), len(sizes)))
    files, at = [], end + 1
    for size in sizes:
        files.append(memoryview(data)[at : at + size])
        at += size
    return manifest, files


def _object(text: bytes) -> dict[str, Any]:
    try:
        body = json.loads(text)
    except ValueError as error:
        raise _broken(f"is not JSON: {error}") from error
    if not isinstance(body, dict):
        raise _broken("is not a JSON object")
    return body


def _check_paths(paths: Any) -> None:
    if not isinstance(paths, list) or not paths:
        raise _broken("names no frames")
    for path in paths:
        if not isinstance(path, str) or not path:
            raise _broken(f"has a path that is no text: {path!r}")
        if not os.path.isabs(path) or "\x00" in path:
            raise _broken(f"has the path {path[:200]!r}; paths are absolute and local")


def _timing(metadata: dict[str, Any], count: int) -> tuple[float, float, int, tuple[int, ...]]:
    fps: Any = metadata.get("fps")
    total: Any = metadata.get("total_num_frames")
    indices: Any = metadata.get("frames_indices")
    if not isinstance(fps, (int, float)) or isinstance(fps, bool) or not 0 < fps < float("inf"):
        raise _broken(f"has fps {fps!r}; it must be above 0")
    if not _is_count(total, 1):
        raise _broken(f"has total_num_frames {total!r}; it must be above 0")
    if not isinstance(indices, list) or not all(_is_count(i, 0) for i in indices):
        raise _broken("has frames_indices that are not all whole numbers from 0")
    if len(indices) != count:
        raise _broken(f"has {count} frames and {len(indices)} frames_indices")
    duration = metadata.get("duration")
    if (
        not isinstance(duration, (int, float))
        or isinstance(duration, bool)
        or not 0 <= duration < float("inf")
    ):
        duration = int(total) / fps
    return float(fps), float(duration), int(total), tuple(indices)


def _is_count(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _broken(what: str) -> OmnifleetError:
    return OmnifleetError(Reason.INVALID_MEDIA, f"the frame manifest {what}")
