"""Which checkpoints stay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from omnifleet_trainer.checkpoint import Retention


def test_union_of_newest_and_best_by_hand() -> None:
    scores = [(1, 0.9), (2, 0.1), (3, None), (4, 0.9), (5, float("nan"))]
    assert Retention(1).keeps(scores) == {5}
    assert Retention(1, 1).keeps(scores) == {4, 5}  # of equals the later one
    assert Retention(2, 2).keeps(scores) == {1, 4, 5}
    assert Retention(1, 1, higher_is_better=False).keeps(scores) == {2, 5}
    assert Retention(0).keeps(scores) == {5}  # never none
    assert Retention(1, 2).keeps([(1, None), (2, None), (3, 0.0)]) == {2, 3}


@given(
    st.dictionaries(st.integers(0, 50), st.none() | st.floats(allow_infinity=False), min_size=1),
    st.integers(1, 5),
    st.integers(0, 5),
    st.booleans(),
)
def test_the_newest_always_stay_and_nothing_better_is_dropped(
    scores: dict[int, float | None], latest: int, best: int, higher: bool
) -> None:
    kept = Retention(latest, best, higher).keeps(scores.items())
    assert set(sorted(scores)[-latest:]) <= kept
    assert len(kept) <= latest + best
    known = {step: score for step, score in scores.items() if score is not None and score == score}
    dropped, chosen = known.keys() - kept, known.keys() & kept
    if best and dropped:
        worst = min if higher else max
        others = [known[step] for step in chosen]
        assert all(
            sum(score >= known[step] if higher else score <= known[step] for score in others)
            >= min(best, len(known) - 1)
            for step in dropped
        ), (worst, kept)
