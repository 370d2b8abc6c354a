"""Which rank trains which samples of a step. Pure: every rank works it out alike."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.samples import TrainingSample as Sample


def updates_of(batch: StepBatch, batch_samples: int | None) -> list[range]:
    """Rows of each optimiser update: `batch_samples` each, or all of the step."""
    count = len(batch.samples)
    size = batch_samples or max(count, 1)
    return [range(start, min(start + size, count)) for start in range(0, count, size)]


def shares(batch: StepBatch, rows: Sequence[int], ranks: int) -> list[list[int]]:
    """`rows` dealt to `ranks`, longest unit first to the rank with the fewest tokens; rows of each in their order.

    A unit is what shares a prompt's media (a group), so that a picture is sent to, and encoded on, one rank; single
    samples where there are fewer than two groups a rank.
    """
    if ranks == 1:
        return [list(rows)]
    groups: dict[str, list[int]] = {}
    for row in rows:
        groups.setdefault(batch.samples[row].group_id, []).append(row)
    units = list(groups.values()) if len(groups) >= 2 * ranks else [[row] for row in rows]
    weighed = [(sum(batch.samples[row].length for row in unit), unit) for unit in units]
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    loads = [0] * ranks
    for weight, unit in sorted(weighed, key=lambda pair: (-pair[0], pair[1][0])):
        lightest = loads.index(min(loads))
        dealt[lightest] += unit
        loads[lightest] += weight
    return [sorted(rows) for rows in dealt]


def shard(batch: StepBatch, rows: Sequence[int]) -> StepBatch:
    """The step as a rank that trains `rows` needs it: every sample, and the media segments of its own, each once."""
    keys = {key for row in rows for key in batch.samples[row].segment_keys}
    return StepBatch(batch.samples, batch.step, {key: batch.segments[key] for key in keys})


def reply_lengths(samples: Sequence[Sample], rows: Sequence[int]) -> list[int]:
    """Response tokens of each of `rows`."""
    return [len(samples[row].token_ids) for row in rows]
