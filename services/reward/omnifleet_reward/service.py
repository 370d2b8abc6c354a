"""What the reward service does, free of any wire: score a batch, list scorers, find the reachable maximum."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.telemetry.counters import Counters
from omnifleet_reward.combine import Reward
from omnifleet_reward.pool import Pool
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Scorer, Verdict


@dataclass(frozen=True, slots=True)
class Scored:
    """One item: its total and its components by name@version, or the error that makes it unscorable."""

    total: Verdict
    components: tuple[tuple[str, Verdict], ...]
    error: OmnifleetError | None = None


@dataclass(frozen=True, slots=True)
class Reachable:
    """The best total under a prompt template and a reply that gets it."""

    maximum: float
    example: str
    reward_version: str


class RewardService:
    """Registry and pool as one. The pool is entered and left by whoever made it."""

    def __init__(self, config: RewardConfig, registry: Registry, pool: Pool, counters: Counters) -> None:
        self._config = config
        self._registry = registry
        self._pool = pool
        self._counters = counters

    @property
    def ready(self) -> bool:
        """True if items are served."""
        return self._pool.alive

    def scorers(self) -> list[Scorer]:
        """All known scorers."""
        return self._registry.known()

    async def score(
        self, scorers: Sequence[ScorerConfig], replies: Sequence[Reply], timeout_s: float = 0.0
    ) -> tuple[list[Scored], str]:
        """Results in the order of `replies`, and the reward version.

        timeout_s: limit of each item; 0 or more than `item_timeout_s` means `item_timeout_s`.
        Raises INVALID_REQUEST, NOT_FOUND (scorers), OVERLOADED, LIMIT_EXCEEDED (queue).
        """
        reward = self._registry.reward(scorers)
        scored = await self._judge(reward, replies, timeout_s)
        self._counters.add("batches")
        self._counters.add("items", len(scored))
        for item in scored:
            if item.error is not None:
                self._counters.add("items_unscorable")
                self._counters.add(f"items_unscorable_{item.error.reason}")
        return scored, reward.version

    async def reachable(self, scorers: Sequence[ScorerConfig], prompt_suffix: str) -> Reachable:
        """The most that a reply can get after a prompt that ends in `prompt_suffix`: the best of the scorers' examples.

        Raises UNSUPPORTED if a scorer gives no examples, and the scorer's error if an example is unscorable.
        """
        reward = self._registry.reward(scorers)
        replies: list[Reply] = []
        for term in reward.terms:
            if term.scorer.examples is None:
                message = f"scorer {term.scorer.label} gives no examples, so its maximum is not known"
                raise invalid(message, knob="Scorer.examples", reason=Reason.UNSUPPORTED)
            replies += term.scorer.examples(prompt_suffix, term.params)
        scored = await self._judge(reward, replies, 0.0)
        for item in scored:
            if item.error is not None:
                raise item.error
        best, reply = max(zip(scored, replies, strict=True), key=lambda pair: pair[0].total.score)
        return Reachable(best.total.score, reply.response, reward.version)

    async def _judge(self, reward: Reward, replies: Sequence[Reply], timeout_s: float) -> list[Scored]:
        limit = self._config.item_timeout_s
        terms = [term.wire() for term in reward.terms]
        requests = [{"terms": terms, "reply": asdict(reply)} for reply in replies]
        results = await self._pool.judge(requests, min(timeout_s or limit, limit))
        return [_scored(reward, result) for result in results]


def _scored(reward: Reward, result: list[Verdict] | OmnifleetError) -> Scored:
    if isinstance(result, OmnifleetError):
        return Scored(Verdict(0.0), (), result)
    labels = [term.scorer.label for term in reward.terms]
    return Scored(reward.total(result), tuple(zip(labels, result, strict=True)))
