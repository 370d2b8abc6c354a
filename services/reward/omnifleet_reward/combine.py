"""Several scorers as one reward: normalised weights, one score, one opinion, one version."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from omnifleet.types import Mark
from omnifleet_reward.scorer import Scorer, Verdict

_SEVERITY = list(Mark)
_DIGITS = 12  # weights that differ by float rounding only are the same reward


@dataclass(frozen=True, slots=True)
class Term:
    """One scorer with its checked parameters and its share of the total (shares sum to 1)."""

    scorer: Scorer
    params: BaseModel
    weight: float

    def wire(self) -> dict[str, Any]:
        """What a scorer process needs to find the scorer again."""
        return {
            "name": self.scorer.name,
            "version": self.scorer.version,
            "params": self.params.model_dump(mode="json"),
        }


@dataclass(frozen=True, slots=True)
class Reward:
    """The weighted sum that trains."""

    terms: tuple[Term, ...]

    @property
    def version(self) -> str:
        """Sorted name@version joined by +, then # and 16 hex characters over weights and parameters."""
        from omnifleet.address import (  # numpy, which scorer processes need not load
            canonical_json,
            digest_bytes,
        )

        terms = sorted(self.terms, key=lambda term: term.scorer.label)
        body = [term.wire() | {"weight": round(term.weight, _DIGITS)} for term in terms]
        labels = "+".join(term.scorer.label for term in terms)
        return f"{labels}#{digest_bytes(canonical_json(body), 'reward')[:16]}"

    def total(self, verdicts: Sequence[Verdict]) -> Verdict:
        """score = Σ weight · score; correct = AND over the verdicts with an opinion (NeMo RL's combined reward).

        mark: the worst of the verdicts'.
        """
        score = sum(term.weight * verdict.score for term, verdict in zip(self.terms, verdicts, strict=True))
        opinions = [verdict.correct for verdict in verdicts if verdict.correct is not None]
        mark = max((verdict.mark for verdict in verdicts), key=_SEVERITY.index, default=Mark.SCORED)
        return Verdict(score, all(opinions) if opinions else None, mark)
