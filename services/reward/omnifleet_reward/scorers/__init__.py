"""The scorers that come with the service, one file each: functions that know no process and no wire."""

from omnifleet_reward.scorer import Scorer
from omnifleet_reward.scorers import (
    bbox_giou,
    click,
    exact_alnum,
    exact_text,
    format,
    geo3k,
    json_schema,
    judge,
    math_expr,
    mcqa,
    numeric,
    regex,
    remote,
    strict_format,
)

BUILT_IN: tuple[Scorer, ...] = (
    format.SCORER,
    strict_format.SCORER,
    exact_alnum.SCORER,
    exact_text.SCORER,
    math_expr.SCORER,
    geo3k.SCORER,
    bbox_giou.SCORER,
    mcqa.SCORER,
    click.SCORER,
    numeric.SCORER,
    regex.SCORER,
    json_schema.SCORER,
    judge.SCORER,
    remote.SCORER,
)
"""Oldest version of a name first."""
