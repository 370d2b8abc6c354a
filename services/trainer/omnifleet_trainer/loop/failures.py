"""What a failed attempt means: for the run, for the prompt, or for nobody but the machine it ran on."""

from __future__ import annotations

from dataclasses import dataclass

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Outcome

FATAL = frozenset(
    {
        Reason.UNAUTHENTICATED,
        Reason.FORBIDDEN,
        Reason.CONTRACT_MISMATCH,
        Reason.LOGPROBS_MODE,
        Reason.INVALID_CONFIG,
        Reason.UNSUPPORTED,
        Reason.MODEL_MISSING,
        Reason.DISK_FULL,
    }
)
"""No other prompt would fare better: the run ends and says why."""

_HOPELESS = frozenset({Reason.PROMPT_TOO_LONG, Reason.INVALID_MEDIA, Reason.LIMIT_EXCEEDED})
_CRASHES = frozenset({Reason.ENGINE_ERROR, Reason.INTERNAL})


@dataclass
class RefusedSample(OmnifleetError):
    """A reply that must not train. `check` names what it failed, for counters."""

    check: str = ""


@dataclass
class Unscorable(OmnifleetError):
    """A reply without a reward. It is never given one."""


@dataclass
class Unplayable(OmnifleetError):
    """A row that its environment refuses: another try would say the same."""


@dataclass
class Stale(OmnifleetError):
    """A reply from weights that are not ours any more."""


def outcome_of(error: OmnifleetError) -> Outcome:
    """INFRA_ERROR is nobody's fault and may be tried for ever; PROMPT_ERROR, ENVIRONMENT_CRASH, UNSCORABLE are bounded.

    A rollout that outlived its time counts as the prompt's: else one endless prompt would be tried for ever.
    """
    match error:
        case Stale():
            return Outcome.STALE
        case Unscorable():
            return Outcome.UNSCORABLE
        case RefusedSample(retryable=False) | Unplayable():
            return Outcome.PROMPT_ERROR
    if error.reason in FATAL:
        return Outcome.INFRA_ERROR
    if error.reason in _CRASHES:
        return Outcome.ENVIRONMENT_CRASH
    if error.reason is Reason.DEADLINE:
        return Outcome.PROMPT_ERROR
    if error.retryable or error.reason in (Reason.MEDIA_LOST, Reason.CORRUPT, Reason.NOT_FOUND):
        return Outcome.INFRA_ERROR
    return Outcome.PROMPT_ERROR


def tries_of(error: OmnifleetError, attempts_per_prompt: int) -> int:
    """How often a prompt may fail like this: once where another try gives the same."""
    return 1 if error.reason in _HOPELESS or isinstance(error, Unplayable) else attempts_per_prompt


def first_of(errors: BaseExceptionGroup[OmnifleetError]) -> OmnifleetError:
    """The first error of a task group: that is what went wrong, the rest followed."""
    error = errors.exceptions[0]
    return first_of(error) if isinstance(error, BaseExceptionGroup) else error
