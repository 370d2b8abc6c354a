"""Payloads in the ledger: zstd over JSON and arrays. What all samples of a group share is stored once, with the group."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
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
_ARRAYS = b"\x01"
_BYTES = "B"
_OWN = ("prompt_token_ids", "prompt_hash", "media")
_EXTRAS = ("routed_experts", "sampling_mask")
_MAX_BYTES = 256 << 20  # a damaged header must not make us allocate without bound


def pack(body: dict[str, Any], arrays: Mapping[str, Sequence[float] | bytes] = {}) -> bytes:
    """JSON and flat arrays -> zstd. NaN and infinity are refused (ValueError).

    arrays: name -> numbers or bytes; ints as int32, floats as float64, little-endian: exact, and an order of magnitude
    quicker than their decimal text. Layout: version byte, length of the JSON (u32), JSON, array bytes in the order of `_arrays`.
    """
    columns = {name: _column(values) for name, values in arrays.items()}
    kinds = [[name, column.typecode, len(column)] for name, column in columns.items()]
    text = json.dumps(
        {**body, "_arrays": kinds}, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    ).encode()
    raw = b"".join([_ARRAYS, len(text).to_bytes(4, "little"), text, *(c.tobytes() for c in columns.values())])
    return zstandard.compress(raw, _LEVEL)


def unpack(payload: bytes) -> dict[str, Any]:
    """Undo `pack`; {} for a payload that retention took. Payloads of earlier releases are JSON alone."""
    if not payload:
        return {}
    raw = zstandard.decompress(payload, max_output_size=_MAX_BYTES)
    if not raw.startswith(_ARRAYS):
        old: dict[str, Any] = json.loads(raw)
        return old
    at = 5 + int.from_bytes(raw[1:5], "little")
    body: dict[str, Any] = json.loads(raw[5:at])
    for name, kind, count in body.pop("_arrays"):
        column = array(kind)
        column.frombytes(raw[at : at + count * column.itemsize])
        at += count * column.itemsize
        body[name] = column.tobytes() if kind == _BYTES else column.tolist()
    return body


def _column(values: Sequence[float] | bytes) -> array[Any]:
    if isinstance(values, bytes):
        return array(_BYTES, values)
    if all(type(value) is int for value in values):
        return array("i", values)
    column = array("d", values)
    if not np.isfinite(np.frombuffer(column)).all():
        raise ValueError("Out of range float values are not JSON compliant")
    return column


def pack_shared(first: Trajectory) -> bytes:
    """What all trajectories of a group have in common: the prompt as the engine saw it, and as the reward did."""
    return pack(
        {
            "prompt_hash": first.prompt_hash,
            "logprobs_mode": first.logprobs_mode,
            "media": [[ref.kind, ref.digest] for ref in first.media],
            "prompt": first.prompt,
            "ground_truth": first.ground_truth,
            "prompt_suffix": first.prompt_suffix,
            "extra": first.extra,
        },
        {"prompt_token_ids": first.prompt_token_ids},
    )


def pack_trajectory(trajectory: Trajectory) -> bytes:
    """What belongs to one trajectory alone."""
    identity = trajectory.identity
    return pack(
        {
            "identity": {name: getattr(identity, name) for name in Identity.__dataclass_fields__},
            "spans": [_pack_span(span) for span in trajectory.spans],
            "finish_reason": trajectory.finish_reason,
            "text": trajectory.text,
            "reward": trajectory.reward,
            "reward_version": trajectory.reward_version,
            "components": trajectory.components,
            **(_own_facts(trajectory) if trajectory.mask else {}),
        },
        {
            "token_ids": trajectory.token_ids,
            "logprobs": trajectory.logprobs,
            **(_own_tokens(trajectory) if trajectory.mask else {}),
            **{name: data for name in _EXTRAS if (data := getattr(trajectory, name))},
        },
    )


def _own_facts(trajectory: Trajectory) -> dict[str, Any]:
    """What the samples of an environment need not share: each episode has media of its own, and tokens."""
    media = [[ref.kind, ref.digest] for ref in trajectory.media]
    return {"prompt_hash": trajectory.prompt_hash, "media": media}


def _own_tokens(trajectory: Trajectory) -> dict[str, list[int]]:
    return {"mask": trajectory.mask, "prompt_token_ids": trajectory.prompt_token_ids}


def unpack_trajectory(trajectory_id: str, shared: dict[str, Any], own: dict[str, Any]) -> Trajectory:
    """Join both parts."""
    shared = {**shared, **{name: own[name] for name in _OWN if name in own}}
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
        mask=own.get("mask", []),
        **{name: own[name] for name in _EXTRAS if name in own},
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
