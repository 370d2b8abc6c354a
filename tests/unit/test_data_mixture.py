"""Mixtures: shares, epochs, and that a resume needs nothing but the ledger."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError
from omnifleet_trainer.data import Mixture, PromptRow
from omnifleet_trainer.ledger import SqliteLedger
from omnifleet_trainer.loop.prompts import Prompts


def _rows(name: str, n: int) -> list[PromptRow]:
    return [PromptRow(f"{name}/{at}", "q", (), "a", name) for at in range(n)]


def test_without_weights_every_epoch_shows_every_row_once() -> None:
    mixture = Mixture([_rows("a", 3), _rows("b", 5)])
    assert sorted(mixture.epoch_order(0, 0)) == list(range(8))
    assert mixture.epoch_order(0, 0) != mixture.epoch_order(0, 1)
    assert [mixture[at].prompt_id for at in (0, 2, 3, 7, -1)] == ["a/0", "a/2", "b/0", "b/4", "b/4"]
    assert mixture.prompt_ids == [row.prompt_id for row in mixture]


def test_weights_set_the_shares_of_an_epoch() -> None:
    mixture = Mixture([_rows("a", 10), _rows("b", 100)], [1, 3])
    order = mixture.epoch_order(0, 0)
    assert Counter(mixture[at].task for at in order) == {"a": 10, "b": 30}


@settings(deadline=None, max_examples=40)
@given(st.lists(st.tuples(st.integers(1, 20), st.floats(0.1, 5)), min_size=1, max_size=4), st.integers(0, 3))
def test_a_set_goes_round_evenly_whatever_its_share(sets: list[tuple[int, float]], seed: int) -> None:
    mixture = Mixture([_rows(str(i), n) for i, (n, _) in enumerate(sets)], [share for _, share in sets])
    seen: Counter[int] = Counter()
    for epoch in range(60):
        order = mixture.epoch_order(seed, epoch)
        assert order == mixture.epoch_order(seed, epoch)
        assert max(Counter(order).values()) <= 2  # the end of a round and the beginning of the next
        seen.update(order)
    start = 0
    for n, _ in sets:
        times = [seen[at] for at in range(start, start + n)]
        assert max(times) - min(times) <= 1
        start += n


def test_sets_that_cannot_be_mixed_are_refused() -> None:
    for sets, shares in (
        ([], None),
        ([_rows("a", 1), []], None),
        ([_rows("a", 1)], [1.0, 2.0]),
        ([_rows("a", 1)], [0.0]),
    ):
        with pytest.raises(OmnifleetError):
            Mixture(sets, shares)


def test_a_resume_goes_on_in_the_middle_of_a_mixed_epoch(tmp_path: Path) -> None:
    mixture = Mixture([_rows("a", 4), _rows("b", 40)], [1, 1])
    seen: list[str] = []
    for life in range(4):
        ledger = SqliteLedger(tmp_path / "ledger.sqlite", owner=str(life))
        ledger.roll_back_to(0, str(life))
        prompts = Prompts(mixture, ledger, seed=7, max_epochs=3)
        for _ in range(6):
            lease = prompts.lease(version=0, ttl_s=60)
            assert lease is not None
            seen.append(lease.prompt_id)
            ledger.fail_attempt(lease, outcome=_prompt_error(), error="", limit=1)
        ledger.close()
    wanted = [mixture.prompt_ids[at] for epoch in range(3) for at in mixture.epoch_order(7, epoch)]
    assert seen == wanted


def _prompt_error():  # type: ignore[no-untyped-def]
    from omnifleet.types import Outcome

    return Outcome.PROMPT_ERROR
