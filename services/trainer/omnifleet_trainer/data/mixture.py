"""Several sets as one, in given shares. Which rows an epoch takes is a function of seed and epoch: nothing to save."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Sequence

import numpy as np

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.lazy import LazyRows, ids_of
from omnifleet_trainer.data.rows import PromptRow


class Mixture(LazyRows):
    """All rows of all sets, one after the other; `epoch_order` says which of them an epoch shows.

    shares: how often each set is picked, relative. An epoch shows the set with the fewest rows for its share once;
    others go on where the epoch before left them, round after round, so that over the epochs all rows of a set are shown
    equally often. Without shares every epoch shows every row once.
    """

    def __init__(self, sets: Sequence[Sequence[PromptRow]], shares: Sequence[float] | None = None) -> None:
        """Raises INVALID_CONFIG for no set, an empty one, or shares that are not positive."""
        self._sets = list(sets)
        sizes = [len(rows) for rows in self._sets]
        if not sizes or not all(sizes):
            raise invalid(
                f"sets of {sizes} rows cannot be mixed", knob="data.train", reason=Reason.INVALID_CONFIG
            )
        if shares is not None and (len(shares) != len(sizes) or min(shares) <= 0):
            raise invalid(
                f"{len(sizes)} sets need as many positive weights, not {list(shares)}",
                knob="data.train.weight",
                reason=Reason.INVALID_CONFIG,
            )
        self._starts: list[int] = np.concatenate([[0], np.cumsum(sizes)]).tolist()
        self._taken = sizes if shares is None else _rows_an_epoch(sizes, shares)

    def __len__(self) -> int:
        return int(self._starts[-1])

    @property
    def prompt_ids(self) -> list[str]:
        """All ids in order."""
        return [name for rows in self._sets for name in ids_of(rows)]

    def _row(self, at: int) -> PromptRow:
        place = bisect.bisect_right(self._starts, at) - 1
        return self._sets[place][at - self._starts[place]]

    def epoch_order(self, seed: int, epoch: int) -> list[int]:
        """Row numbers of an epoch, in the order of training."""
        picked = [
            start + at
            for place, start in enumerate(self._starts[:-1])
            for at in self._picks(place, seed, epoch)
        ]
        order = np.random.default_rng((seed, epoch)).permutation(len(picked))
        return [picked[at] for at in order]

    def _picks(self, place: int, seed: int, epoch: int) -> Iterator[int]:
        """Rows [epoch x k, (epoch + 1) x k) of the set's endless sequence: one permutation after the other."""
        size, count = len(self._sets[place]), self._taken[place]
        at, end = epoch * count, (epoch + 1) * count
        while at < end:
            turn, start = divmod(at, size)
            stop = min(size, start + end - at)
            order = np.random.default_rng((seed, place, turn)).permutation(size)
            yield from (int(row) for row in order[start:stop])
            at += stop - start


def _rows_an_epoch(sizes: Sequence[int], shares: Sequence[float]) -> list[int]:
    length = min(size / share for size, share in zip(sizes, shares, strict=True))
    return [max(1, min(size, int(share * length + 1e-9))) for size, share in zip(sizes, shares, strict=True)]
