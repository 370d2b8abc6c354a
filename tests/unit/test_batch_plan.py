"""Which samples share a forward pass: within the budget, little padding, pictures in few passes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError
from omnifleet.types import Digest
from omnifleet_trainer.batch.plan import plan, waste
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.shares import shares
from tests.unit.test_batch_shares import sample

BUDGET = 16384


def synthetic(*, prompts: int = 32, generations: int = 16, seed: int = 0) -> StepBatch:
    """Prompts of 60 to 1,500 tokens and replies of 20 to 1,024, both log-normal, as GRPO of pictures has them."""
    random = np.random.default_rng(seed)
    samples = []
    for group in range(prompts):
        prompt = int(np.clip(random.lognormal(6.0, 0.8), 60, 1500))
        for _ in range(generations):
            reply = int(np.clip(random.lognormal(5.0, 0.9), 20, 1024))
            samples.append(sample(f"{len(samples)}", f"g{group}", prompt=prompt, reply=reply))
    return StepBatch(samples, 0)


@pytest.mark.parametrize("ranks", [1, 2, 8])
@pytest.mark.parametrize("seed", range(3))
def test_padding_wastes_at_most_a_tenth(ranks: int, seed: int) -> None:
    batch = synthetic(seed=seed)
    for rows in shares(batch, range(len(batch.samples)), ranks):
        cuts = plan(batch, rows, {}, micro_batch_tokens=BUDGET)
        assert sum(len(cut) for cut in cuts) == len(rows)
        assert waste(batch, cuts) <= 0.10
    unsorted = [list(range(i, i + 8)) for i in range(0, len(batch.samples), 8)]
    assert waste(batch, unsorted) > 0.2  # what is saved


def test_packing_fills_passes_to_the_budget() -> None:
    batch = synthetic()
    rows = range(len(batch.samples))
    cuts = plan(batch, rows, {}, micro_batch_tokens=BUDGET, packed=True)
    totals = [sum(batch.samples[row].length for row in cut) for cut in cuts]
    assert all(total <= BUDGET for total in totals)
    assert min(totals[:-1]) > 0.85 * BUDGET
    assert len(cuts) <= len(plan(batch, rows, {}, micro_batch_tokens=BUDGET))


def test_samples_of_a_picture_share_passes_where_that_costs_less() -> None:
    """Replies of two lengths: by length each picture would be in two passes."""
    samples = [
        sample(f"{i}", f"g{i // 4}", prompt=400, reply=40 if i % 2 else 10, media="abcd"[i // 4])
        for i in range(16)
    ]
    batch = StepBatch(samples, 0)

    def encoded(cuts: list[list[int]]) -> int:
        return sum(len({key for row in cut for key in samples[row].segment_keys}) for cut in cuts)

    free = plan(batch, range(16), {}, micro_batch_tokens=1800)
    heavy = plan(batch, range(16), dict.fromkeys(map(Digest, "abcd"), 380), micro_batch_tokens=1800)
    assert encoded(heavy) == 4 < encoded(free)
    assert waste(batch, free) < waste(batch, heavy)


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 3)), min_size=1, max_size=30),
    st.booleans(),
    st.integers(1, 8),
)
def test_every_row_is_in_one_pass_within_the_budget(
    lengths: list[tuple[int, int]], packed: bool, multiple: int
) -> None:
    batch = StepBatch([sample(f"{i}", f"g{g}", reply=n) for i, (n, g) in enumerate(lengths)], 0)
    cuts = plan(batch, range(len(lengths)), {}, micro_batch_tokens=80, multiple=multiple, packed=packed)
    assert sorted(row for cut in cuts for row in cut) == list(range(len(lengths)))
    for cut in cuts:
        widths = [-(-batch.samples[row].length // multiple) * multiple for row in cut]
        assert (sum(widths) if packed else max(widths) * len(cut)) <= 80


def test_a_sample_that_no_pass_holds_names_the_knob() -> None:
    with pytest.raises(OmnifleetError) as refused:
        plan(StepBatch([sample("s", "g", prompt=90)], 0), [0], {}, micro_batch_tokens=80)
    assert refused.value.knob == "trainer.micro_batch_tokens"
