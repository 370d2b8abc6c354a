"""The scorers that come with the service, one file each: pure functions that know no process and no wire."""

from omnifleet_reward.scorer import Scorer
from omnifleet_reward.scorers import exact_alnum, format

BUILT_IN: tuple[Scorer, ...] = (format.SCORER, exact_alnum.SCORER)
"""Oldest version of a name first."""
