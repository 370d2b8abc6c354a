"""REINFORCE, the gradient of RLOO. Sources: Williams 1992; RLOO 2402.14740.

    L = -A · log π

RLOO is this with baseline = leave_one_out and std = none. With old data, importance_correction supplies the weight.
"""

from __future__ import annotations

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.port import Surrogate, nowhere, token_ratio
from omnifleet_trainer.objectives.tensors import Tokens


def reinforce(tokens: Tokens, objective: ObjectiveConfig) -> Surrogate:
    """The plain policy gradient; the ratio is for metrics only."""
    ratio = token_ratio(tokens).detach()
    return Surrogate(-tokens.advantages * tokens.current, ratio, ratio, nowhere(tokens), nowhere(tokens))
