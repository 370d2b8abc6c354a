"""The model of refits to many receivers: what it must say where the answer is known."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench" / "refit"))

from scaling_model import Fleet, table

FLEET = Fleet(size=16e9, bucket=1e6, link=50e9, inner=400e9, hop=0.0, ranks=1, senders=8)


def test_one_rank_takes_the_bytes_once_over_its_link_however_it_is_sent() -> None:
    for seconds in (FLEET.chain_s(1), FLEET.tree_s(1), FLEET.nodes_s(1), FLEET.shards_s(1)):
        assert seconds == pytest.approx(16 / 50)


def test_chains_grow_by_a_bucket_a_rank_and_trees_by_two_a_level() -> None:
    assert FLEET.chain_s(512) - FLEET.chain_s(1) == pytest.approx(511 * 1e6 / 50e9)
    assert FLEET.tree_s(511) - FLEET.tree_s(3) == pytest.approx(7 * 2e6 / 50e9)
    assert FLEET.tree_s(3) == pytest.approx(2 * 16 / 50, rel=1e-3)


def test_shards_divide_the_bytes_by_the_ranks_as_far_as_senders_and_replicas_allow() -> None:
    split = replace(FLEET, ranks=4)
    assert split.shards_s(1) == pytest.approx(16 / 50 / 4)
    assert replace(split, senders=2).shards_s(1) == pytest.approx(16 / 50 / 2)
    assert replace(split, replicated=4.0).shards_s(1) == pytest.approx(16 / 50)
    assert split.nodes_s(8) < split.chain_s(8), "what lies within a host does not cross links twice"


def test_nonsense_is_refused_and_the_table_has_a_row_for_each_number() -> None:
    with pytest.raises(ValueError, match="positive"):
        replace(FLEET, link=0)
    with pytest.raises(ValueError, match="replicated"):
        replace(FLEET, replicated=2.0)
    assert len(table(FLEET, (1, 64, 512)).splitlines()) == 5
