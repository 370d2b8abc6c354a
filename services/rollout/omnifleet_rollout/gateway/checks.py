"""What can be refused about a token request before any worker is asked, and its single-sample form."""

from __future__ import annotations

from omnifleet.errors import invalid
from omnifleet.types import LogprobsMode
from omnifleet.wire import rollout_pb2

MAX_SAMPLES = 1024
"""Most samples of one request."""


def check(request: rollout_pb2.GenerateRequest) -> None:
    """What can be refused before a worker is asked. Raises INVALID_REQUEST."""
    sampling = request.sampling
    if not request.request_id:
        raise invalid("request_id must not be empty")
    if not request.tokens.token_ids:
        raise invalid("the prompt has no tokens")
    if not 1 <= sampling.n <= MAX_SAMPLES or sampling.max_tokens < 1:
        raise invalid(
            f"sampling.n {sampling.n} must be in 1..{MAX_SAMPLES}, max_tokens {sampling.max_tokens} at least 1"
        )
    if sampling.temperature < 0 or not 0 < sampling.top_p <= 1:
        raise invalid(f"temperature {sampling.temperature} must be >= 0 and top_p {sampling.top_p} in (0, 1]")
    if request.expected_logprobs_mode not in ("", *LogprobsMode):
        raise invalid(
            f"expected_logprobs_mode {request.expected_logprobs_mode!r}: allowed are raw, processed"
        )
    if request.continuation.token_ids:
        raise invalid("continuation is between the gateway and workers; ask for the whole reply")


def one_sample(sampling: rollout_pb2.Sampling, index: int) -> rollout_pb2.Sampling:
    """Sampling of the index-th sample; each has its own seed."""
    one = rollout_pb2.Sampling()
    one.CopyFrom(sampling)
    one.n = 1
    if one.HasField("seed"):
        one.seed = (one.seed + index) % (1 << 63)
    return one
