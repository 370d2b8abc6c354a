"""Early stop: an evaluation that beats the best one resets the count."""

from __future__ import annotations

from collections.abc import Sequence


def out_of_patience(scores: Sequence[float], *, patience: int | None, min_gain: float) -> bool:
    """True if the last `patience` scores all failed to beat the best one before them by more than `min_gain`.

    scores: held-out rewards in order, the one before training first. None: never.
    """
    if patience is None:
        return False
    best, since = float("-inf"), 0
    for score in scores:
        if score > best + min_gain:
            best, since = score, 0
        else:
            since += 1
    return since >= patience
