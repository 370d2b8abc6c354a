"""Forms of the policy gradient, one file each: tokens and settings in, a loss per token out."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.objectives.surrogates.aipo import aipo
from omnifleet_trainer.objectives.surrogates.cispo import cispo
from omnifleet_trainer.objectives.surrogates.clipped import clipped
from omnifleet_trainer.objectives.surrogates.dppo import dppo_tv
from omnifleet_trainer.objectives.surrogates.port import Surrogate
from omnifleet_trainer.objectives.surrogates.reinforce import reinforce
from omnifleet_trainer.objectives.surrogates.sapo import sapo
from omnifleet_trainer.objectives.surrogates.topr import topr
from omnifleet_trainer.objectives.tensors import Tokens

SURROGATES: Mapping[str, Callable[[Tokens, ObjectiveConfig], Surrogate]] = MappingProxyType(
    {
        "clipped": clipped,
        "cispo": cispo,
        "aipo": aipo,
        "sapo": sapo,
        "topr": topr,
        "dppo_tv": dppo_tv,
        "reinforce": reinforce,
    }
)
"""By the name in `objective.surrogate`."""
