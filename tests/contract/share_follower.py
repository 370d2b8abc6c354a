"""A follower of a world whose ranks compute nothing: each exports the tensors of `tests/refit_model.py`, step by step.

Run as `python -m tests.contract.share_follower PARENT`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator

import torch

from omnifleet_trainer.policy import follower, job
from tests import refit_model

HIDDEN = 64


class Steps:
    """As much of a policy as exports: the weights of step 0, 1, 2, ..."""

    encoder_trains = False

    def __init__(self) -> None:
        self._step = -1

    def export(self) -> Iterator[tuple[str, torch.Tensor]]:
        self._step += 1
        yield from refit_model.tensors(self._step).items()

    def trainable_names(self) -> set[str]:
        return refit_model.MOVES

    def close(self) -> None:
        pass


if __name__ == "__main__":
    refit_model.HIDDEN = HIDDEN
    job.open_rank = lambda *told, **named: Steps()  # type: ignore[assignment,return-value]
    sys.exit(follower.main())
