"""Samples to micro-batches, padded on the right; `plan` says which share one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.errors import invalid
from omnifleet.sounds import features_heard
from omnifleet.types import Digest
from omnifleet_trainer.batch.plan import plan
from omnifleet_trainer.batch.samples import Segment, StepBatch, TrainingSample

TEXT, IMAGE, VIDEO, AUDIO = 0, 1, 2, 3
_MOST_KEPT = 1 << 28


@dataclass(frozen=True, slots=True)
class MediaContract:
    """How a model's prompts carry media: one `image_token`, `video_token` or `sound_token` a feature, merge x merge patches a
    feature.

    video_token: None for a model that takes no clips; image_token for one whose clips are pictures to its prompt.
    sound_token, hears: None for a model that takes no sounds; sizes of its encoder of sounds, see `omnifleet.sounds`.
    """

    image_token: int
    merge: int
    video_token: int | None = None
    sound_token: int | None = None
    hears: Mapping[str, Any] | None = None

    def types(self, ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """TEXT, IMAGE, VIDEO or AUDIO of each id."""
        types = np.where(ids == self.image_token, IMAGE, TEXT)
        if self.sound_token is not None:
            types = np.where(ids == self.sound_token, AUDIO, types)
        if self.video_token in (None, self.image_token):
            return types
        return np.where(ids == self.video_token, VIDEO, types)

    def kind(self, segment: Segment) -> int:
        """IMAGE, VIDEO or AUDIO: what the tokens of a segment are."""
        if is_sound(segment):
            return AUDIO
        return VIDEO if is_clip(segment) and self.video_token != self.image_token else IMAGE


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One forward pass. B samples, S positions; every per-token tensor is [B, S], not shifted, 0 in the padding.

    rows: place of each sample in the step. input_ids, attention_mask, token_types (IMAGE, VIDEO, AUDIO = a feature of
    one), lag: int64. token_mask, generation_logprobs, advantages: float32. sample_mask: [B] float32. truncated: [B] bool.
    first: smallest prompt length, so columns first.. hold all responses. media: segment key of each picture, clip or
    sound, sample by sample in prompt order; grids: [media, 3] as `grid_of` has them, in the same order. kept: [B, S, K]
    int64 ids that the sampler's filters kept at each token, padded with -1; None if no sample knows them. experts:
    [B, S, L, K] int64, which K experts each of L layers gives a token to, as the engine chose; -1 where it did not say,
    None likewise.
    """

    rows: tuple[int, ...]
    input_ids: Tensor
    attention_mask: Tensor
    token_types: Tensor
    token_mask: Tensor
    generation_logprobs: Tensor
    advantages: Tensor
    lag: Tensor
    sample_mask: Tensor
    truncated: Tensor
    prompt_lengths: tuple[int, ...]
    lengths: tuple[int, ...]
    first: int
    media: tuple[Digest, ...]
    grids: Tensor
    kept: Tensor | None = None
    experts: Tensor | None = None

    def to(self, device: torch.device) -> MicroBatch:
        """The same micro-batch with its tensors on `device`."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        moved: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, Tensor)
        }
        return replace(self, **moved)


def collate(
    batch: StepBatch,
    rows: Sequence[int],
    *,
    micro_batch_tokens: int,
    contract: MediaContract | None,
    multiple: int = 1,
    advantage_clip: float | None = None,
    packed: bool = False,
    cached: bool = False,
) -> list[MicroBatch]:
    """Cut samples `rows` of a step into micro-batches of at most `micro_batch_tokens` padded tokens.

    packed: the model lays the rows one after the other, so padding counts for nothing. cached: the tower's outputs are, so
    it does not matter which samples share a picture. Lengths are padded to a multiple
    of `multiple`. Advantages are clamped to +-advantage_clip if it is set. Raises OmnifleetError(INVALID_REQUEST) for a
    sample longer than a micro-batch, or whose media tokens do not stand for its media's features, in number, kind and
    order.
    """
    features: dict[Digest, int] = {}
    if contract is not None and not cached:
        features = {key: features_of(segment, contract) for key, segment in batch.segments.items()}
    cuts = plan(
        batch, rows, features, micro_batch_tokens=micro_batch_tokens, multiple=multiple, packed=packed
    )
    return [_micro_batch(batch, cut, contract, multiple, advantage_clip) for cut in cuts]


def idle(device: torch.device, multiple: int = 1) -> MicroBatch:
    """A micro-batch of nothing: two tokens of no sample, none of which trains. Keeps a rank in step with the others."""
    shape = (1, -(-2 // multiple) * multiple)
    whole = torch.zeros(shape, dtype=torch.int64, device=device)
    real = torch.zeros(shape, device=device)
    return MicroBatch(
        rows=(),
        input_ids=whole,
        attention_mask=torch.ones_like(whole),
        token_types=whole,
        token_mask=real,
        generation_logprobs=real,
        advantages=real,
        lag=whole,
        sample_mask=real[0, :1],
        truncated=torch.zeros(1, dtype=torch.bool, device=device),
        prompt_lengths=(1,),
        lengths=(2,),
        first=1,
        media=(),
        grids=torch.zeros((0, 3), dtype=torch.int64, device=device),
    )


def is_clip(segment: Segment) -> bool:
    """Whether a segment holds a clip, not a picture."""
    return "video_grid_thw" in segment


def is_sound(segment: Segment) -> bool:
    """Whether a segment holds a sound."""
    return "input_features" in segment


def grid_of(segment: Segment) -> npt.NDArray[np.int64]:
    """[items, 3] patches (t, h, w) of a segment; of a sound its (pieces, frames, bands)."""
    if is_sound(segment):
        return np.asarray([segment["input_features"].shape], np.int64)
    if "image_grid_hw" in segment:  # Nemotron's pictures
        sizes = np.asarray(segment["image_grid_hw"], dtype=np.int64).reshape(-1, 2)
        return np.insert(sizes, 0, 1, axis=1)
    name = "video_grid_thw" if is_clip(segment) else "image_grid_thw"
    return np.asarray(segment[name], dtype=np.int64).reshape(-1, 3)


def patches_of(segment: Segment) -> npt.NDArray[np.float32]:
    """[patches, values] of a segment."""
    return np.asarray(segment["pixel_values_videos" if is_clip(segment) else "pixel_values"])


def features_of(segment: Segment, contract: MediaContract) -> int:
    """Features that a model of this contract makes of a segment: its tokens in a prompt.

    Raises OmnifleetError(INVALID_REQUEST) for a sound that the model does not hear, and pixels that are no grid.
    """
    if is_sound(segment):
        if contract.hears is None:
            raise invalid("a media segment is a sound, the model hears none")
        return sum(features_heard(contract.hears, int(n)) for n in segment["input_features_mask"].sum(1))
    patches, pixels = int(grid_of(segment).prod(-1).sum()), patches_of(segment)
    if pixels.ndim == 2 and len(pixels) != patches:  # a clip of whole tiles has more axes
        raise invalid(f"a media segment has {len(pixels)} rows of pixels for a grid of {patches}")
    return patches // contract.merge**2


def _micro_batch(
    batch: StepBatch,
    rows: Sequence[int],
    contract: MediaContract | None,
    multiple: int,
    advantage_clip: float | None,
) -> MicroBatch:
    samples = [batch.samples[row] for row in rows]
    width = _padded(max(sample.length for sample in samples), multiple)
    size = (len(samples), width)
    whole = {name: np.zeros(size, np.int64) for name in ("input_ids", "attention_mask", "token_types", "lag")}
    real = {name: np.zeros(size, np.float32) for name in ("token_mask", "generation_logprobs", "advantages")}
    for i, sample in enumerate(samples):
        start, end = len(sample.prompt_token_ids), sample.length
        whole["input_ids"][i, :end] = sample.prompt_token_ids + sample.token_ids
        whole["attention_mask"][i, :end] = 1
        whole["token_types"][i, :end] = _token_types(sample, batch, contract)
        whole["lag"][i, start:end] = sample.lag
        real["token_mask"][i, start:end] = _trained(sample, contract)
        real["generation_logprobs"][i, start:end] = sample.generation_logprobs
        real["advantages"][i, start:end] = advantage_row(sample, sample.advantage, advantage_clip)
    grids = [grid_of(batch.segments[key]) for sample in samples for key in sample.segment_keys]
    return MicroBatch(
        rows=tuple(rows),
        **{name: torch.from_numpy(value) for name, value in (whole | real).items()},
        sample_mask=torch.tensor([float(sample.valid) for sample in samples]),
        truncated=torch.tensor([sample.truncated for sample in samples]),
        prompt_lengths=tuple(len(sample.prompt_token_ids) for sample in samples),
        lengths=tuple(sample.length for sample in samples),
        first=min(len(sample.prompt_token_ids) for sample in samples),
        media=tuple(key for sample in samples for key in sample.segment_keys),
        grids=torch.from_numpy(np.concatenate(grids) if grids else np.zeros((0, 3), np.int64)),
        kept=_kept(samples, width),
        experts=_experts(samples, width),
    )


def _kept(samples: Sequence[TrainingSample], width: int) -> Tensor | None:
    most = max((len(ids) for sample in samples for ids in sample.kept_ids or ()), default=0)
    if not most:
        return None
    if len(samples) * width * most > _MOST_KEPT:
        raise invalid(
            f"{len(samples)} x {width} tokens of up to {most} kept ids are more than {_MOST_KEPT} in one micro-batch",
            knob="sampling.top_k, or trainer.micro_batch_tokens",
        )
    kept = np.full((len(samples), width, most), -1, np.int64)
    for i, sample in enumerate(samples):
        for t, ids in enumerate(sample.kept_ids or (), len(sample.prompt_token_ids)):
            kept[i, t, : len(ids)] = ids
    return torch.from_numpy(kept)


def _experts(samples: Sequence[TrainingSample], width: int) -> Tensor | None:
    """-1 for what is not known: padding, the last token, samples that do not train."""
    known = [sample.experts for sample in samples if sample.experts is not None]
    if not known:
        return None
    lacking = [s.trajectory_id for s in samples if s.valid and s.experts is None]
    shapes = {experts.shape[1:] for experts in known}
    if lacking or len(shapes) > 1:
        raise invalid(
            f"samples of one batch come with routed experts of one shape or with none: {sorted(shapes)}"
            + (f", none in {lacking[0]}" if lacking else ""),
            knob="rollout.engine.return_routed_experts",
        )
    (layers, chosen) = shapes.pop()
    experts = np.full((len(samples), width, layers, chosen), -1, np.int64)
    for i, sample in enumerate(samples):
        if sample.experts is not None:
            experts[i, : len(sample.experts)] = sample.experts
    return torch.from_numpy(experts)


def _token_types(
    sample: TrainingSample, batch: StepBatch, contract: MediaContract | None
) -> npt.NDArray[np.int64]:
    """Marks of all tokens: media may stand in the prompt and in what an environment said between replies (mask 0).

    A media token that the model itself wrote is text: it has no features.
    """
    ids = np.asarray(sample.prompt_token_ids + sample.token_ids, np.int64)
    if contract is None:
        if sample.segment_keys:
            raise invalid(f"sample {sample.trajectory_id} has media, the model takes none")
        return np.zeros(len(ids), np.int64)
    own = np.asarray([0] * len(sample.prompt_token_ids) + sample.mask)
    types = np.where(own == 1, TEXT, contract.types(ids))
    segments = [batch.segments[key] for key in sample.segment_keys]
    counts = [features_of(segment, contract) for segment in segments]
    kinds = [contract.kind(segment) for segment in segments]
    if not np.array_equal(types[types != TEXT], np.repeat(kinds, counts)):
        features = {kind: sum(n for k, n in zip(kinds, counts, strict=True) if k == kind) for kind in kinds}
        found = [
            f"{int((types == kind).sum())} {name} tokens"
            for kind, name in ((IMAGE, "image"), (VIDEO, "video"), (AUDIO, "sound"))
        ]
        heard = f", {found[2]} for {features.get(AUDIO, 0)}" if contract.hears is not None else ""
        raise invalid(
            f"sample {sample.trajectory_id}: {found[0]} in the prompt for {features.get(IMAGE, 0)} features, "
            f"{found[1]} for {features.get(VIDEO, 0)}{heard}, or not in the order of its media"
        )
    return types


def _trained(sample: TrainingSample, contract: MediaContract | None) -> npt.NDArray[np.float32]:
    mask = np.asarray(sample.mask, np.float32)
    if contract is not None:
        mask = mask * (contract.types(np.asarray(sample.token_ids, np.int64)) == TEXT)
    return mask.astype(np.float32)


def advantage_row(
    sample: TrainingSample, advantage: float, clip: float | None = None
) -> npt.NDArray[np.float32]:
    """Advantage of each response token: the sample's, but in faulty messages what the fault costs; clamped to ±clip."""
    row = np.full(len(sample.token_ids), advantage, np.float32)
    for start, end, penalty in sample.penalties:
        row[start:end] = penalty
    return row if clip is None else row.clip(-clip, clip)


def _padded(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple
