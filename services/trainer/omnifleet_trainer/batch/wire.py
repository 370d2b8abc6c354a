"""A step between the processes of one policy: JSON for what is said of a sample, arrays for its tokens and pixels."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load, save

from omnifleet.types import Digest, MediaKind, MediaRef
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample

_TOKENS = {
    "prompt_token_ids": "<i4",
    "token_ids": "<i4",
    "generation_logprobs": "<f8",
    "mask": "<i4",
    "lag": "<i4",
}
_PLAIN = (
    "trajectory_id",
    "group_id",
    "prompt_hash",
    "reward",
    "advantage",
    "segment_keys",
    "truncated",
    "valid",
    "penalties",
    "kept_ids",
)
_EXPERTS = "experts"


def encode(batch: StepBatch) -> bytes:
    """Length of the JSON (u32), JSON, safetensors. Exact: floats travel as float64, pixels in their own dtype."""
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, kind in _TOKENS.items():
        columns = [np.asarray(getattr(sample, name), kind) for sample in batch.samples]
        arrays[name] = np.concatenate([np.zeros(0, kind), *columns])
    for i, sample in enumerate(batch.samples):
        if sample.experts is not None:
            arrays[f"{_EXPERTS}/{i}"] = np.ascontiguousarray(sample.experts)
    keys = list(batch.segments)
    for i, key in enumerate(keys):
        for name, value in batch.segments[key].items():
            arrays[f"{i}/{name}"] = np.ascontiguousarray(value)
    body = {
        "step": batch.step,
        "keys": keys,
        "samples": [
            {name: getattr(sample, name) for name in _PLAIN}
            | {"media": [[ref.kind, ref.digest] for ref in sample.media]}
            | {"lengths": [len(getattr(sample, name)) for name in _TOKENS]}
            for sample in batch.samples
        ],
    }
    text = json.dumps(body, separators=(",", ":")).encode()
    return len(text).to_bytes(4, "little") + text + save(arrays)


def decode(data: bytes) -> StepBatch:
    """Undo `encode`."""
    end = 4 + int.from_bytes(data[:4], "little")
    body, arrays = json.loads(data[4:end]), load(data[end:])
    places = dict.fromkeys(_TOKENS, 0)
    samples = []
    for fields in body["samples"]:
        tokens: dict[str, Any] = {}
        for name, length in zip(_TOKENS, fields.pop("lengths"), strict=True):
            tokens[name] = arrays[name][places[name] : places[name] + length].tolist()
            places[name] += length
        fields["media"] = tuple(MediaRef(MediaKind(kind), Digest(key)) for kind, key in fields["media"])
        fields["segment_keys"] = tuple(Digest(key) for key in fields["segment_keys"])
        fields["penalties"] = tuple((start, end, cost) for start, end, cost in fields["penalties"])
        samples.append(TrainingSample(**fields, **tokens))
    segments: dict[Digest, dict[str, npt.NDArray[Any]]] = {Digest(key): {} for key in body["keys"]}
    for name, value in arrays.items():
        if name in _TOKENS:
            continue
        place, _, field = name.partition("/")
        if place == _EXPERTS:
            samples[int(field)].experts = value
        else:
            segments[Digest(body["keys"][int(place)])][field] = value
    return StepBatch(samples, body["step"], segments)
