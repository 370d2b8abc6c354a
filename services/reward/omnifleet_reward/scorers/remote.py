"""`remote`: the score that another HTTP service gives."""

from __future__ import annotations

import math
from typing import Any

from pydantic import Field

from omnifleet.config.base import StrictModel
from omnifleet.types import Mark
from omnifleet_reward.scorer import Network, Reply, Scorer, Verdict


class Params(StrictModel):
    """Whom to ask."""

    endpoint: str
    """Name of one of `reward_service.endpoints`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Sent along as `options`."""


async def ask(reply: Reply, params: Params, network: Network) -> Verdict:
    """POST {"response", "ground_truth", "prompt", "media", "extra", "options"} → {"score", "correct", "mark"}.

    score: a finite number. correct: true, false or null (default). mark: "scored" (default) or "unparseable".
    Anything else is asked for again within the endpoint's attempts, then the item is unscorable.
    Example: the service answers {"score": 0.25, "correct": false} → 0.25, wrong.
    """
    body = {
        "response": reply.response,
        "ground_truth": reply.ground_truth,
        "prompt": reply.prompt,
        "media": list(reply.media),
        "extra": dict(reply.extra),
        "options": params.options,
    }
    return await network.post(params.endpoint, body, _read)


def _read(answer: Any) -> Verdict:
    score, correct = answer["score"], answer.get("correct")
    if isinstance(score, bool) or not isinstance(score, int | float) or not math.isfinite(score):
        raise ValueError(f"score is a finite number, not {score!r}")
    if correct is not None and not isinstance(correct, bool):
        raise ValueError(f"correct is true, false or null, not {correct!r}")
    mark = Mark(answer.get("mark", Mark.SCORED))
    if mark not in (Mark.SCORED, Mark.UNPARSEABLE):
        raise ValueError(f"mark is scored or unparseable, not {mark}")
    return Verdict(float(score), correct, mark)


SCORER = Scorer("remote", "1", "Score that another HTTP service gives.", params=Params, ask=ask)
