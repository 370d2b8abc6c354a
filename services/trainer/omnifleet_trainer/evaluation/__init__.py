"""Held-out score: greedy replies through the same gateway and reward service as training.

The room knows the loop's prompter and nothing of training.
"""

from omnifleet_trainer.evaluation.heldout import Evaluation, HeldOut
from omnifleet_trainer.evaluation.pictures import Pictures, altered

__all__ = ["Evaluation", "HeldOut", "Pictures", "altered"]
