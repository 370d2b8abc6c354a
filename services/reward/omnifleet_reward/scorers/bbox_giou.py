"""`bbox_giou`: how well does the answer's box cover the reference's? NeMo RL's rule, safe against reversed boxes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet.errors import invalid
from omnifleet_reward.places import tagged
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict

Box = tuple[float, float, float, float]
Unit = Literal["same", "pixels", "resized", "per_mille", "fraction"]

_LEAST_AREA = 1e-3
_RIGHT = 0.5


class Params(StrictModel):
    """The threshold, and the units of both boxes."""

    giou_penalty_thres: float = 10.0
    """Below this IoU the GIoU counts; above 1 it always does."""
    answer_tag: str = Field("answer", min_length=1)
    """Tag around the box."""
    truth_unit: Unit = "same"
    """Unit of the reference. `same`: both boxes are in one unit, whatever it is."""
    answer_unit: Unit = "same"
    """Unit of the answer: `pixels` of the picture, pixels as `resized` for the model, `per_mille` or `fraction` of its
    sides. Sizes come from the row: extra.image_size and extra.resized_size, [width, height]."""


def judge(reply: Reply, params: Params) -> Verdict:
    """score = IoU if IoU ≥ giou_penalty_thres, else GIoU = IoU − (C − U) / C; correct = score > 0.5. In [−1, 1].

    I, U, C: areas of intersection, union (≥ 0.001) and hull (≥ 0.001). Boxes are x1, y1, x2, y2 with brackets removed.
    An answer that is no box is 0 and unparseable. Unlike NeMo RL so is a box whose corners are swapped: its formula gives
    [10,10,0,0] against [0,0,10,10] the score +1.

    Examples (reference [0,0,10,10], threshold 0.5): [0,0,10,10] → 1; [0,0,10,5] → 0.5; [10,10,20,20] → −0.5.
    """
    answer = tagged(params.answer_tag, reply.response)
    given = None if answer is None else _box(answer)
    if given is None:
        return UNPARSEABLE
    known = _box(reply.ground_truth)
    if known is None:
        raise invalid(
            f"the reference {reply.ground_truth[:80]!r} is not a box x1,y1,x2,y2 with x1 <= x2 and y1 <= y2"
        )
    if not params.truth_unit == params.answer_unit == "same":
        known = _in_fractions(known, params.truth_unit, reply.extra)
        given = _in_fractions(given, params.answer_unit, reply.extra)
        width, height = _size(reply.extra, "image_size")  # back to pixels: the least areas are meant for them
        known, given = _scaled(known, width, height), _scaled(given, width, height)
    score = giou(known, given, params.giou_penalty_thres)
    return Verdict(score, score > _RIGHT)


def giou(known: Box, given: Box, threshold: float) -> float:
    """IoU from `threshold` on, GIoU below."""
    inner = max(0.0, min(known[2], given[2]) - max(known[0], given[0])) * max(
        0.0, min(known[3], given[3]) - max(known[1], given[1])
    )
    union = max(_LEAST_AREA, _area(known) + _area(given) - inner)
    iou = inner / union
    if iou >= threshold:
        return iou
    hull = _area(
        (
            min(known[0], given[0]),
            min(known[1], given[1]),
            max(known[2], given[2]),
            max(known[3], given[3]),
        )
    )
    hull = max(_LEAST_AREA, hull)
    return iou - (hull - union) / hull


def _area(box: Box) -> float:
    return (box[2] - box[0]) * (box[3] - box[1])


def _box(text: str) -> Box | None:
    try:
        x1, y1, x2, y2 = (float(part) for part in text.replace("[", "").replace("]", "").split(","))
    except ValueError:
        return None
    if not all(math.isfinite(side) and abs(side) < 1e9 for side in (x1, y1, x2, y2)) or x2 < x1 or y2 < y1:
        return None
    return x1, y1, x2, y2


def _in_fractions(box: Box, unit: Unit, extra: Mapping[str, Any]) -> Box:
    if unit == "fraction":
        return box
    if unit == "per_mille":
        return _scaled(box, 1 / 1000, 1 / 1000)
    if unit == "same":
        raise invalid("truth_unit and answer_unit are both `same` or both a unit", knob="reward.params")
    width, height = _size(extra, "image_size" if unit == "pixels" else "resized_size")
    return _scaled(box, 1 / width, 1 / height)


def _scaled(box: Box, across: float, down: float) -> Box:
    return box[0] * across, box[1] * down, box[2] * across, box[3] * down


def _size(extra: Mapping[str, Any], field: str) -> tuple[float, float]:
    size = extra.get(field)
    if (
        not isinstance(size, list | tuple)
        or len(size) != 2
        or not all(isinstance(side, int | float) and side > 0 for side in size)
    ):
        raise invalid(f"extra.{field} is [width, height], not {size!r}")
    return float(size[0]), float(size[1])


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The reference itself, in units of the whole picture."""
    size = {"image_size": [1000, 1000], "resized_size": [1000, 1000]}

    def whole(unit: Unit) -> str:
        side = 1 if unit == "fraction" else 1000
        return f"[0,0,{side},{side}]"

    answer = f"<{params.answer_tag}>{whole(params.answer_unit)}</{params.answer_tag}>"
    return [Reply(answer, whole(params.truth_unit), extra=size)]


SCORER = Scorer(
    "bbox_giou", "1", "IoU, or GIoU below a threshold, of the answer's box.", judge, Params, examples
)
