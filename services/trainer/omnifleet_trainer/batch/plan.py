"""Which samples share a forward pass: of two orders the one that computes less.

By length wastes the least padding; group by group encodes each picture in the fewest passes. A feature costs the tower
about what a token costs the language model (Qwen2.5-VL 3B: four patches through 0.7 B weights, a token through 3 B), so
padded tokens and encoded features are counted alike.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from omnifleet.errors import invalid
from omnifleet.types import Digest
from omnifleet_trainer.batch.samples import StepBatch

SPARE = 0.1
"""Share of a padded pass that may be padding, where length alone decides."""
ENOUGH = 512
"""Tokens that are worth a pass of their own."""


def plan(
    batch: StepBatch,
    rows: Sequence[int],
    features: Mapping[Digest, int],
    *,
    micro_batch_tokens: int,
    multiple: int = 1,
    packed: bool = False,
) -> list[list[int]]:
    """`rows` cut into passes of at most `micro_batch_tokens` tokens, padded ones included unless `packed`.

    features: of each segment that a pass has to encode; {} where outputs are cached. Raises OmnifleetError(INVALID_REQUEST)
    for a sample that no pass can hold.
    """
    widths = {row: -(-batch.samples[row].length // multiple) * multiple for row in rows}
    for row, width in widths.items():
        if width > micro_batch_tokens:
            raise invalid(
                f"sample {batch.samples[row].trajectory_id} takes {width} tokens, a micro-batch {micro_batch_tokens}",
                knob="trainer.micro_batch_tokens",
            )
    longest: dict[str, int] = {}
    for row in rows:
        group = batch.samples[row].group_id
        longest[group] = max(longest.get(group, 0), widths[row])
    by_length = sorted(rows, key=lambda row: -widths[row])
    by_group = sorted(
        rows,
        key=lambda row: (-longest[batch.samples[row].group_id], batch.samples[row].group_id, -widths[row]),
    )
    plans = [
        _cut(by_length, widths, micro_batch_tokens, packed=packed, spare=SPARE),
        _cut(by_group, widths, micro_batch_tokens, packed=packed),
    ]
    return min(plans, key=lambda cuts: sum(_cost(batch, cut, widths, features, packed) for cut in cuts))


def waste(batch: StepBatch, cuts: Sequence[Sequence[int]]) -> float:
    """Share of padding in the positions that padded passes compute."""
    lengths = [[batch.samples[row].length for row in cut] for cut in cuts]
    computed = sum(max(cut) * len(cut) for cut in lengths)
    return 1 - sum(map(sum, lengths)) / computed if computed else 0.0


def _cut(
    order: Sequence[int], widths: Mapping[int, int], limit: int, *, packed: bool, spare: float = 1.0
) -> list[list[int]]:
    """Passes filled in order. One that holds a sixteenth of the limit, and ENOUGH, ends before it wastes more than `spare`."""
    cuts: list[list[int]] = []
    widest = total = 0
    for row in order:
        width = widths[row]
        size, real = max(widest, width) * (len(cuts[-1]) + 1 if cuts else 1), total + width
        fits = (real if packed else size) <= limit
        wasteful = not packed and total >= max(limit // 16, ENOUGH) and size - real > spare * size
        if cuts and fits and not wasteful:
            cuts[-1].append(row)
            widest, total = max(widest, width), real
        else:
            cuts.append([row])
            widest = total = width
    return cuts


def _cost(
    batch: StepBatch,
    cut: Sequence[int],
    widths: Mapping[int, int],
    features: Mapping[Digest, int],
    packed: bool,
) -> int:
    taken = [widths[row] for row in cut]
    keys = {key for row in cut for key in batch.samples[row].segment_keys}
    return (sum(taken) if packed else max(taken) * len(taken)) + sum(features.get(key, 0) for key in keys)
