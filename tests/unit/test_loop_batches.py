"""Groups to batches. GRP-10: a sample that no loss sees must not move the others either."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from omnifleet.config.recipe import ObjectiveConfig
from omnifleet.types import FinishReason
from omnifleet_trainer.loop.batches import AdvantageRule
from tests.unit.ledger_samples import group_of
from tests.unit.loop_world import world


@pytest.mark.parametrize(("filtering", "expected"), [(True, [1.0, -1.0, 0.0]), (False, [1.0, -0.5, -0.5])])
async def test_GRP_10_a_truncated_sample_that_is_masked_enters_no_baseline(
    tmp_path: Path, filtering: bool, expected: list[float]
) -> None:
    with world(tmp_path) as w:
        w.batches._advantages = AdvantageRule(ObjectiveConfig(overlong_filtering=filtering, std="none"))
        lease = w.prompts.lease(version=0, ttl_s=60)
        assert lease is not None
        whole = group_of(lease, versions=(0, 0)).trajectories[0]
        cut = replace(whole, reward=0.0, finish_reason=FinishReason.LENGTH)
        stop = replace(whole, finish_reason=FinishReason.STOP)
        group = replace(
            group_of(lease, versions=(0, 0)),
            trajectories=[replace(stop, reward=1.0), replace(stop, reward=0.0), cut],
        )
        batch = await w.batches.build([group], step=1, version=0)
    assert [sample.advantage for sample in batch.samples] == pytest.approx(expected)
    assert [sample.truncated for sample in batch.samples] == [False, False, True]
