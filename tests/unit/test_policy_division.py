"""Packs divided along their tokens: each token and each prediction lies on one rank, and looks where it looked before."""

from __future__ import annotations

import itertools

import pytest
import torch

from omnifleet.config.parallel import ParallelConfig
from omnifleet_trainer.batch.collate import collate
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.megatron_sequence import Division
from omnifleet_trainer.policy.packing import Packing
from tests.unit.test_batch_shares import sample


@pytest.fixture
def packing(monkeypatch: pytest.MonkeyPatch) -> Packing:
    monkeypatch.setattr("torch.distributed.new_group", list)
    batch = StepBatch([sample(f"{i}", f"g{i}", prompt=3 + i) for i in range(3)], 3)
    (micro,) = collate(batch, range(3), micro_batch_tokens=1000, contract=None, packed=True)
    return Packing(micro, 8)


def divisions(**sizes: int) -> list[Division]:
    parallel = ParallelConfig(**sizes)
    return [Division(parallel, rank) for rank in range(parallel.world)]


def test_a_pack_is_filled_up_with_a_row_of_nothing(packing: Packing) -> None:
    assert packing.tokens % 8 == 0 and int(packing.bounds[-1]) == packing.tokens
    assert packing.packed(torch.ones(3, packing._real.shape[1])).sum() == packing._real.sum()


def test_neighbours_of_other_tensor_ranks_share_a_sequence(packing: Packing) -> None:
    assert [division.group for division in divisions(dp=2, cp=2, tp=2)] == [
        [0, 2], [1, 3], [0, 2], [1, 3], [4, 6], [5, 7], [4, 6], [5, 7],
    ]  # fmt: skip
    assert all(division.whole for division in divisions(dp=2, tp=2))


def test_every_token_looks_at_what_is_before_it_in_its_row(packing: Packing) -> None:
    masks = [division.mask(packing) for division in divisions(cp=4)]
    whole = torch.cat([mask for mask in masks if mask is not None])
    expected = torch.zeros(packing.tokens, packing.tokens, dtype=torch.bool)
    bounds = packing.bounds.tolist()
    for start, end in itertools.pairwise(bounds):
        expected[start:end, start:end] = torch.ones(end - start, end - start).tril().bool()
    assert torch.equal(whole, expected)


def test_every_prediction_is_made_by_one_rank(packing: Packing) -> None:
    tokens = torch.arange(packing.tokens)[None]
    found = torch.full_like(packing.predictions, -1)
    for division in divisions(cp=4):
        places, here = division.predictions(packing)
        assert not isinstance(here, slice) and (found[here] == -1).all()
        found[here] = division.part(tokens)[0, places]
    assert torch.equal(found, packing.predictions)


def test_features_go_where_their_tokens_go(packing: Packing) -> None:
    marks = (torch.arange(packing.tokens) % 3 == 0)[None]
    features = torch.arange(int(marks.sum()))[:, None].float()
    parts = [division.features(marks, [features, -features]) for division in divisions(cp=4)]
    assert torch.equal(torch.cat([part[0] for part in parts], 1), marks)
    assert torch.equal(torch.cat([part[1][0] for part in parts]), features)
    assert all(len(part[1][1]) == int(part[0].sum()) for part in parts)
