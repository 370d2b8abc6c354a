"""Advantages of a step to mean 0 and deviation 1. Source: REINFORCE++ 2501.03262; NeMo RL `reinforce_plus_plus`.

    A ← (A - mean) / sqrt(max(var, 1e-8))

Mean and variance are over all trained tokens of the step (each carries the advantage of its sample), unbiased.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

_FLOOR = 1e-8


def whitened(advantages: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """advantages: one a sample; tokens: how many of its tokens train. Samples without any stay as they are.

    Advantages that are all equal become exactly 0: there is nothing to prefer.
    """
    counted = [(a, n) for a, n in zip(advantages, tokens, strict=True) if n > 0]
    total = sum(n for _, n in counted)
    if not total:
        return list(advantages)
    if all(a == counted[0][0] for a, _ in counted):
        return [0.0 if n > 0 else a for a, n in zip(advantages, tokens, strict=True)]
    mean = math.fsum(a * n for a, n in counted) / total
    squares = math.fsum(n * (a - mean) ** 2 for a, n in counted)
    deviation = math.sqrt(max(squares / (total - 1), _FLOOR))
    return [(a - mean) / deviation if n > 0 else a for a, n in zip(advantages, tokens, strict=True)]
