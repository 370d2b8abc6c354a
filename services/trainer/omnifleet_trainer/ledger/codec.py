"""Payloads in the ledger: zstd-compressed JSON. What all samples of a group share is stored once, with the group."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import zstandard

from omnifleet.types import (
    Digest,
    FinishReason,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Trajectory,
    VersionSpan,
    WeightVersion,
)

_LEVEL = 3
_MAX_BYTES = 256 << 20  # a damaged header must not make us allocate without bound


def pack(body: dict[str, Any]) -> bytes:
    """JSON -> zstd. NaN and infinity are refused (ValueError)."""
    text = json.dumps(body, separators=(",", ":"), ensure_ascii=False, allow_nan=False)
    return zstandard.compress(text.encode(), _LEVEL)


def unpack(payload: bytes) -> dict[str, Any]:
    """Undo `pack`; {} for a payload that retention took."""
    if not payload:
        return {}
    body: dict[str, Any] = json.loads(zstandard.decompress(payload, max_output_size=_MAX_BYTES))
    return body


def pack_shared(first: Trajectory) -> bytes:
    """What all trajectories of a group have in common: the prompt as the engine saw it, and as the reward did."""
    return pack(
        {
            "prompt_token_ids": first.prompt_token_ids,
            "prompt_hash": first.prompt_hash,
            "logprobs_mode": first.logprobs_mode,
            "media": [[ref.kind, ref.digest] for ref in first.media],
            "prompt": first.prompt,
            "ground_truth": first.ground_truth,
            "prompt_suffix": first.prompt_suffix,
            "extra": first.extra,
        }
    )


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """What belongs to one trajectory alone."""
    identity = trajectory.identity
    return pack(
        {
            "identity": {name: getattr(identity, name) for name in Identity.__dataclass_fields__},
            "token_ids": trajectory.token_ids,
            "logprobs": trajectory.logprobs,
            "spans": [_pack_span(span) for span in trajectory.spans],
            "finish_reason": trajectory.finish_reason,
            "text": trajectory.text,
            "reward": trajectory.reward,
            "reward_version": trajectory.reward_version,
            "components": trajectory.components,
        }
    )


def unpack_trajectory(trajectory_id: str, shared: dict[str, Any], own: dict[str, Any]) -> Trajectory:
    """Join both parts."""
    return Trajectory(
        id=trajectory_id,
        identity=Identity(**own["identity"]),
        prompt_token_ids=shared["prompt_token_ids"],
        prompt_hash=shared["prompt_hash"],
        logprobs_mode=LogprobsMode(shared["logprobs_mode"]),
        media=tuple(MediaRef(MediaKind(kind), Digest(digest)) for kind, digest in shared["media"]),
        token_ids=own["token_ids"],
        logprobs=own["logprobs"],
        spans=[unpack_span(span) for span in own["spans"]],
        finish_reason=FinishReason(own["finish_reason"]),
        text=own["text"],
        reward=own["reward"],
        reward_version=own["reward_version"],
        components=own["components"],
        # Ledgers of earlier releases lack these.
        prompt=shared.get("prompt", ""),
        ground_truth=shared.get("ground_truth", ""),
        prompt_suffix=shared.get("prompt_suffix", ""),
        extra=shared.get("extra", {}),
    )


def light_spans(spans: Sequence[VersionSpan]) -> str:
    """Spans as JSON without run and manifest digest (the `weights` table has that): what stays after retention."""
    return json.dumps(
        [[s.version.lineage, s.version.number, s.start, s.end, s.worker] for s in spans],
        separators=(",", ":"),
    )


def _pack_span(span: VersionSpan) -> list[Any]:
    version = span.version
    return [
        version.run,
        version.lineage,
        version.number,
        version.manifest_digest,
        span.start,
        span.end,
        span.worker,
    ]


def unpack_span(body: list[Any]) -> VersionSpan:
    """[run, lineage, number, manifest digest, start, end, worker] -> span."""
    return VersionSpan(WeightVersion(*body[:4]), *body[4:])
