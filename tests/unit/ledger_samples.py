"""Small groups for the ledger's tests."""

from __future__ import annotations

from omnifleet.address import token_digest
from omnifleet.types import (
    Digest,
    FinishReason,
    Group,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Trajectory,
    VersionSpan,
    WeightVersion,
)
from omnifleet_trainer.ledger import PromptLease

PROMPT = [1, 2, 2, 3]


def group_of(
    lease: PromptLease, *, versions: tuple[int, ...] = (0,), samples: int = 2, reward: float = 1.0
) -> Group:
    """A scored group whose samples have one token for each of `versions`."""
    trajectories = [
        Trajectory(
            id=f"{lease.attempt}/{index}",
            identity=Identity("run", prompt_id=lease.prompt_id, sample=index, attempt=lease.attempt),
            prompt_token_ids=PROMPT,
            prompt_hash=token_digest(PROMPT),
            token_ids=list(range(10, 10 + len(versions))),
            logprobs=[-0.5] * len(versions),
            spans=[
                VersionSpan(WeightVersion("run", "a", number), at, at + 1, "worker-0")
                for at, number in enumerate(versions)
            ],
            logprobs_mode=LogprobsMode.PROCESSED,
            finish_reason=FinishReason.STOP,
            text="yes",
            media=(MediaRef(MediaKind.IMAGE, Digest("ab" * 32)),),
            reward=reward,
            reward_version="exact@1",
            components={"exact@1": reward},
            prompt="Is it red?",
            ground_truth="yes",
            prompt_suffix="<think>",
            extra={"task": "colour"},
        )
        for index in range(samples)
    ]
    return Group(lease.attempt, lease.prompt_id, trajectories)
