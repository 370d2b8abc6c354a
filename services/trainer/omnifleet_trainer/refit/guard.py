"""The canary: after each refit the engine's logprobs of fixed tokens are compared with the trainer's own.

Checksums say that bytes arrived; this says that the engine computes the same function of them. What it catches: a plan or
loader that put right bytes in wrong places, weights that an engine derives and did not renew, a wrong cast, a stale cache.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from omnifleet.address import token_digest
from omnifleet.client.fleet import WorkerView
from omnifleet.client.rollout import RolloutClient
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.samples import StepBatch, TrainingSample

log = logging.getLogger("omnifleet.trainer.refit")
CANARY_S = 30.0
"""Deadline of the engine's scores."""
_VERSIONS = 2
"""The newest, and the one before, to which a worker is put back."""


@dataclass(frozen=True, slots=True)
class Canary:
    """prompt, reply: token ids, text only. tolerance: largest difference of one token's logprob that is let pass, nats."""

    prompt: tuple[int, ...]
    reply: tuple[int, ...]
    tolerance: float

    def batch(self) -> StepBatch:
        """The canary as a policy reads it."""
        count = len(self.reply)
        sample = TrainingSample(
            trajectory_id="canary",
            group_id="canary",
            prompt_token_ids=list(self.prompt),
            prompt_hash=token_digest(self.prompt),
            token_ids=list(self.reply),
            generation_logprobs=[0.0] * count,
            mask=[1] * count,
            lag=[0] * count,
            reward=0.0,
        )
        return StepBatch([sample], step=0)


class Guard:
    """Compares workers with what `expect` says of the weights that were published last."""

    def __init__(
        self, canary: Canary, secret: str, expect: Callable[[StepBatch], Awaitable[list[float]]]
    ) -> None:
        """expect: the trainer's logprobs of the canary's reply under its weights of now."""
        self._canary, self._secret, self._expect = canary, secret, expect
        self._expected: dict[int, list[float]] = {}

    async def look(self, number: int) -> None:
        """Take the trainer's logprobs, of the weights that are about to be published as version `number`."""
        self._expected[number] = await self._expect(self._canary.batch())
        while len(self._expected) > _VERSIONS:
            del self._expected[min(self._expected)]

    async def difference(self, worker: WorkerView, number: int) -> float:
        """Largest difference, nats; infinite where one side is not a number, 0 if the worker moved on meanwhile.

        Raises what the worker says.
        """
        async with RolloutClient.open(worker.grpc_address, self._secret) as client:
            scores, version = await client.score_tokens(
                self._canary.prompt, self._canary.reply, deadline_s=CANARY_S
            )
        if version.number != number:
            return 0.0
        pairs = zip(scores, self._expected[number], strict=True)
        gaps = [abs(ours - theirs) for ours, theirs in pairs]
        return max((gap if gap == gap else float("inf") for gap in gaps), default=0.0)

    async def check(self, worker: WorkerView, number: int) -> None:
        """Raises CORRUPT, with what differs by how much, if a worker at version `number` is beyond the tolerance.

        A version that is neither the newest nor the one before is let pass: what the trainer made of it is forgotten.
        """
        if number not in self._expected:
            return
        difference = await self.difference(worker, number)
        log.debug("canary on %s: %.5f nats", worker.id, difference)
        if difference > self._canary.tolerance:
            raise OmnifleetError(
                Reason.CORRUPT,
                f"the canary's logprobs on {worker.id} differ from the trainer's by {difference:.4f} nats, "
                f"{self._canary.tolerance} are allowed",
                knob="refit.canary.tolerance",
            )
