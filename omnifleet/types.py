"""The vocabulary. Every word here means the same in proto, Python, CLI, metrics and docs. Imports nothing of ours."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, NewType

Digest = NewType("Digest", str)
"""64 hex characters: a BLAKE3-256 of content (see `omnifleet.address`)."""


class MediaKind(StrEnum):
    """What a media object is."""

    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


class WorkerState(StrEnum):
    """Life of a rollout worker. Only a verified refit leads to READY."""

    JOINING = "joining"
    CATCHING_UP = "catching_up"
    READY = "ready"
    DRAINING = "draining"
    CORDONED = "cordoned"
    STALE = "stale"
    SUSPECT = "suspect"
    DEAD = "dead"
    RETIRED = "retired"

    @property
    def accepts_new(self) -> bool:
        """True if new sessions may be placed on the worker."""
        return self is WorkerState.READY

    @property
    def gone(self) -> bool:
        """True if the worker never serves again under this id."""
        return self in (WorkerState.DEAD, WorkerState.RETIRED)


class LogprobsMode(StrEnum):
    """RAW: before temperature and filters. PROCESSED: of the distribution that was sampled from."""

    RAW = "raw"
    PROCESSED = "processed"


class InFlight(StrEnum):
    """What a refit does with running requests: go on with old KV, go on with KV computed again, or finish first."""

    KEEP = "keep"
    RECOMPUTE = "recompute"
    DRAIN = "drain"


@dataclass(frozen=True, slots=True)
class WeightVersion:
    """One committed state of the policy. `number` orders versions inside one (run, lineage) only."""

    run: str
    lineage: str
    number: int
    manifest_digest: str = ""

    def same_lineage(self, other: WeightVersion) -> bool:
        """True if both versions are ordered by `number`."""
        return (self.run, self.lineage) == (other.run, other.lineage)

    def __str__(self) -> str:
        return f"{self.run}/{self.lineage}:{self.number}"


@dataclass(frozen=True, slots=True)
class VersionBound:
    """`min` bounds the first token of a reply, `exact` holds for each. At most one is set."""

    min: WeightVersion | None = None
    exact: WeightVersion | None = None

    def admits(self, current: WeightVersion) -> bool:
        """True if an engine at `current` may start a reply under this bound."""
        if self.exact is not None:
            return current.same_lineage(self.exact) and current.number == self.exact.number
        if self.min is not None:
            return current.same_lineage(self.min) and current.number >= self.min.number
        return True


@dataclass(frozen=True, slots=True)
class VersionSpan:
    """Tokens [start, end) of one sample came from `version` on `worker`."""

    version: WeightVersion
    start: int
    end: int
    worker: str = ""


@dataclass(frozen=True, slots=True)
class MediaRef:
    """A media object by content: the digest of its manifest."""

    kind: MediaKind
    digest: Digest

    @property
    def url(self) -> str:
        """The form that chat messages carry: media://DIGEST."""
        return f"media://{self.digest}"


@dataclass(frozen=True, slots=True)
class Identity:
    """Who a request belongs to. `attempt` is the ledger's id of this try."""

    run: str
    environment: str = ""
    session: str = ""
    episode: str = ""
    turn: int = 0
    prompt_id: str = ""
    group_id: str = ""
    sample: int = 0
    attempt: str = ""


@dataclass(frozen=True, slots=True)
class Lease:
    """A time-bounded claim of `owner`; renew before `expires_unix_ms`."""

    id: str
    owner: str
    run: str
    expires_unix_ms: int


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are drawn. `max_tokens` in tokens; `top_k` -1 = off; `seed` gives each of the n samples its own stream."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 64
    n: int = 1
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    banned_token_ids: tuple[int, ...] = ()
    min_tokens: int = 0
    ignore_eos: bool = False


class FinishReason(StrEnum):
    """How a reply ended: by itself, at the token limit, or aborted."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"


@dataclass(slots=True)
class Sample:
    """One finished reply of the rollout service, token-exact.

    token_ids, logprobs: one entry per generated token (logprob of the sampled token, natural log).
    spans: cover [0, len(token_ids)) without gaps.
    routed_experts, sampling_mask: safetensors as the engine's worker wrote them; empty where it returns none.
    """

    index: int
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    spans: list[VersionSpan] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason = FinishReason.STOP
    cached_prompt_tokens: int = 0
    routed_experts: bytes = b""
    sampling_mask: bytes = b""

    @property
    def oldest_version(self) -> int:
        """Smallest version number among the tokens: what staleness is measured from."""
        return min(span.version.number for span in self.spans)


@dataclass(slots=True)
class Generation:
    """All samples of one Generate call and what the model really saw.

    prompt_hash: `omnifleet.address.token_digest` of the expanded prompt ids.
    failures: sample index -> error, for samples that could not be finished.
    """

    request_id: str
    prompt_hash: str
    prompt_token_ids: list[int]
    logprobs_mode: LogprobsMode
    worker: str
    samples: dict[int, Sample]
    failures: dict[int, Exception]


class Outcome(StrEnum):
    """How an attempt ended. Only SCORED trains; an infrastructure failure is never a reward.

    NO_SIGNAL: scored, but all rewards of the group were equal and dynamic sampling dropped it.
    """

    SCORED = "scored"
    INFRA_ERROR = "infra_error"
    PROMPT_ERROR = "prompt_error"
    ENVIRONMENT_CRASH = "environment_crash"
    UNSCORABLE = "unscorable"
    STALE = "stale"
    NO_SIGNAL = "no_signal"


class Mark(StrEnum):
    """How a score came about, best first. TIMEOUT and CRASHED: judging the reply used up its time or its memory."""

    SCORED = "scored"
    UNPARSEABLE = "unparseable"
    TIMEOUT = "timeout"
    CRASHED = "crashed"


@dataclass(slots=True)
class Trajectory:
    """One scored sample with everything the trainer needs to check and to train on it.

    prompt_token_ids: expanded ids as the engine saw them. token_ids/logprobs/spans/routed_experts/sampling_mask: as in Sample.
    prompt, prompt_suffix, ground_truth, extra: what the reward was asked with beside the text, so that it can be again.
    mask: of an environment's episode: one entry a token, 0 = the environment's own words. Empty: the model wrote all.
    """

    id: str
    identity: Identity
    prompt_token_ids: list[int]
    prompt_hash: str
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    logprobs_mode: LogprobsMode
    finish_reason: FinishReason
    text: str
    media: tuple[MediaRef, ...]
    reward: float
    reward_version: str
    components: dict[str, float] = field(default_factory=dict)
    prompt: str = ""
    ground_truth: str = ""
    prompt_suffix: str = ""
    extra: dict[str, Any] = field(default_factory=dict)
    mask: list[int] = field(default_factory=list)
    routed_experts: bytes = b""
    sampling_mask: bytes = b""

    @property
    def oldest_version(self) -> int:
        """Smallest version number among the tokens."""
        return min(span.version.number for span in self.spans)


@dataclass(slots=True)
class Group:
    """All trajectories of one prompt occurrence; keyed by the prompt's id, never by its tokens."""

    id: str
    prompt_id: str
    trajectories: list[Trajectory]

    @property
    def oldest_version(self) -> int:
        """Smallest version number among all tokens of the group."""
        return min(t.oldest_version for t in self.trajectories)
