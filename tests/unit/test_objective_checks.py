"""What a reply must be before it trains: the rows about logprobs."""

from __future__ import annotations

import pytest

from omnifleet.types import FinishReason, Generation, LogprobsMode, Sample, VersionSpan, WeightVersion
from omnifleet_trainer.loop.checks import check_generation, check_sample
from omnifleet_trainer.loop.failures import RefusedSample

VERSION = WeightVersion("run", "l", 3)


def reply(logprobs: list[float], tokens: int = 3) -> Sample:
    ids = list(range(tokens))
    return Sample(0, ids, logprobs, [VersionSpan(VERSION, 0, tokens, "w")], "text", FinishReason.STOP)


@pytest.mark.parametrize("value", [float("-inf"), float("nan"), float("inf"), -9999.0, 0.5])
def test_LPR_05_a_logprob_that_no_sampler_gives_never_trains(value: float) -> None:
    check_sample(reply([-0.1, 0.0, -999.0]), run="run", lineage="l")
    with pytest.raises(RefusedSample, match="token 1 has logprob") as refused:
        check_sample(reply([-0.1, value, -0.2]), run="run", lineage="l")
    assert refused.value.check == "logprobs" and not refused.value.retryable


@pytest.mark.parametrize("count", [0, 2, 4])
def test_LPR_04_as_many_logprobs_as_tokens(count: int) -> None:
    with pytest.raises(RefusedSample, match=f"3 tokens, {count} logprobs"):
        check_sample(reply([-0.1] * count), run="run", lineage="l")


def test_LPR_01_logprobs_of_the_other_mode_are_refused() -> None:
    generation = Generation("r", "h", [1], LogprobsMode.RAW, "w", {0: reply([-0.1] * 3)}, {})
    with pytest.raises(RefusedSample, match="the engine gives raw logprobs, the trainer computes processed"):
        check_generation(generation, prompt_hash="h", mode=LogprobsMode.PROCESSED, run="run", lineage="l")
