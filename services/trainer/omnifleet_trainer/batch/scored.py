"""A sample as the objective sees it. Needs no torch."""

from __future__ import annotations

from omnifleet_trainer.batch.samples import TrainingSample
from omnifleet_trainer.objectives.assign import Scored


def scored(sample: TrainingSample, *, valid: bool = True, kl: float = 0.0) -> Scored:
    """valid: False if a check of the logprobs took the sample out. kl: its KL to the reference, if that is reward."""
    return Scored(
        group=sample.group_id,
        reward=sample.reward,
        tokens=len(sample.token_ids),
        trained=sum(sample.mask),
        truncated=sample.truncated,
        valid=valid and sample.valid,
        kl=kl,
    )
