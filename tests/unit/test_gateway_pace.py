"""Advice to those who were refused: each its own moment, and no more of them a second than samples that end allow."""

from __future__ import annotations

import pytest

from omnifleet_rollout.gateway.pace import RetryPace


def test_a_crowd_is_spread_and_one_alone_comes_back_at_once() -> None:
    pace = RetryPace()
    advice = [pace.advise(10.0) for _ in range(300)]
    assert advice == pytest.approx([0.01 * (i + 1) for i in range(300)])
    assert pace.advise(60.0) == pytest.approx(0.01)


def test_the_crowd_may_come_as_fast_as_samples_end_twice_over() -> None:
    pace = RetryPace()
    for i in range(2000):
        pace.ended(i / 400)
    assert [pace.advise(5.0) for _ in range(800)][-1] == pytest.approx(1.0, rel=0.01)
    assert [pace.advise(20.0) for _ in range(100)][-1] == pytest.approx(1.0), "nothing ended of late"


def test_nobody_is_sent_away_for_longer_than_half_a_minute() -> None:
    pace = RetryPace()
    assert max(pace.advise(0.0) for _ in range(10_000)) == pytest.approx(30.0)
