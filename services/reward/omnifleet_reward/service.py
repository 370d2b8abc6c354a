"""What the reward service does, free of any wire: score a batch, list scorers, find the reachable maximum."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet_reward.combine import Reward, Term
from omnifleet_reward.pool import Plan, Pool
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Network, Reply, Scorer, Verdict

Judged = list[Verdict] | OmnifleetError


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
    """Registry, pool and network as one. The last two are entered and left by whoever made them."""

    def __init__(
        self, config: RewardConfig, registry: Registry, pool: Pool, network: Network, counters: Counters
    ) -> None:
        self._config = config
        self._registry = registry
        self._pool = pool
        self._network = network
        self._counters = counters

    @property
    def ready(self) -> bool:
        """True if items are served."""
        return self._pool.alive

    def scorers(self) -> list[Scorer]:
        """All known scorers."""
        return self._registry.known()

    def version(self, scorers: Sequence[ScorerConfig]) -> str:
        """The reward's version. Raises INVALID_REQUEST, NOT_FOUND."""
        return self._registry.reward(scorers).version

    async def score(
        self, scorers: Sequence[ScorerConfig], replies: Sequence[Reply], timeout_s: float = 0.0
    ) -> tuple[list[Scored], str]:
        """Results in the order of `replies`, and the reward version.

        timeout_s: limit of each item; 0 or more than `item_timeout_s` means `item_timeout_s`. Scorers that ask other
        services have the limits of their endpoint instead.
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
            elif item.total.mark is not Mark.SCORED:
                self._counters.add(f"items_{item.total.mark}")
        return scored, reward.version

    async def reachable(self, scorers: Sequence[ScorerConfig], prompt_suffix: str) -> Reachable:
        """The most that a reply can get after a prompt that ends in `prompt_suffix`.

        Candidates are the scorers' examples, each also in the form that the other scorers like.
        Raises UNSUPPORTED if a scorer gives no examples, and the scorer's error if every example is unscorable.
        """
        reward = self._registry.reward(scorers)
        replies: list[Reply] = []
        for term in reward.terms:
            examples = term.scorer.examples(prompt_suffix, term.params) if term.scorer.examples else ()
            if not examples:
                message = f"scorer {term.scorer.label} gives no examples, so its maximum is not known"
                raise invalid(message, knob="Scorer.examples", reason=Reason.UNSUPPORTED)
            replies += [_in_template(reply, prompt_suffix) for reply in examples]
        replies += [_wrapped(reply, reward.terms) for reply in replies]
        scored = await self._judge(reward, replies, 0.0)
        pairs = [pair for pair in zip(scored, replies, strict=True) if pair[0].error is None]
        if not pairs:
            assert scored[0].error is not None
            raise scored[0].error
        best, reply = max(pairs, key=lambda pair: pair[0].total.score)
        return Reachable(best.total.score, reply.response, reward.version)

    async def _judge(self, reward: Reward, replies: Sequence[Reply], timeout_s: float) -> list[Scored]:
        """Processes first: what is unscorable there need not be asked elsewhere."""
        limit = self._config.item_timeout_s
        local = [term for term in reward.terms if term.scorer.judge is not None]
        local.sort(key=lambda term: term.scorer.beyond is not None)
        judged: list[Judged] = [[] for _ in replies]
        if local:
            bodies = [_body(reply) for reply in replies]
            judged = await self._pool.judge(bodies, _plan(local), min(timeout_s or limit, limit))
        asked = [term for term in reward.terms if term.scorer.ask is not None]
        if asked:
            judged = await asyncio.gather(
                *(self._ask(asked, reply, known) for reply, known in zip(replies, judged, strict=True))
            )
        order = [*local, *asked]
        return [_scored(reward, order, result) for result in judged]

    async def _ask(self, terms: Sequence[Term], reply: Reply, known: Judged) -> Judged:
        if isinstance(known, OmnifleetError):
            return known
        verdicts = list(known)
        for term in terms:
            assert term.scorer.ask is not None
            try:
                verdicts.append(await term.scorer.ask(reply, term.params, self._network))
            except OmnifleetError as error:
                return error
        return verdicts


def _plan(terms: Sequence[Term]) -> Plan:
    return Plan(
        terms=json.dumps([term.wire() for term in terms]),
        beyond=tuple(term.scorer.beyond for term in terms),
        needs=tuple((t.scorer.name, t.scorer.version) for t in terms if t.scorer.prepare is not None),
    )


def _body(reply: Reply) -> dict[str, Any]:
    return {name: getattr(reply, name) for name in Reply.__slots__}


def _in_template(reply: Reply, prompt_suffix: str) -> Reply:
    return Reply(**_body(reply) | {"prompt_suffix": prompt_suffix})


def _wrapped(reply: Reply, terms: Sequence[Term]) -> Reply:
    text = reply.response
    for term in terms:
        if term.scorer.wrap is not None:
            text = term.scorer.wrap(reply.prompt_suffix, term.params, text)
    return Reply(**_body(reply) | {"response": text})


def _scored(reward: Reward, order: Sequence[Term], result: Judged) -> Scored:
    """order: the terms in the order of the verdicts."""
    if isinstance(result, OmnifleetError):
        mark = Mark.TIMEOUT if result.reason is Reason.DEADLINE else Mark.CRASHED
        return Scored(Verdict(0.0, mark=mark), (), result)
    by_label = {term.scorer.label: verdict for term, verdict in zip(order, result, strict=True)}
    labels = [term.scorer.label for term in reward.terms]
    verdicts = [by_label[label] for label in labels]
    return Scored(reward.total(verdicts), tuple(zip(labels, verdicts, strict=True)))
