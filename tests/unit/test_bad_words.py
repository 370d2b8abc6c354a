"""Banned words in vLLM's own sampler: never drawn, and under raw logprobs without a trace in the others' values."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from omnifleet.types import Sampling
from omnifleet_rollout.engine.vllm_generation import sampling_params

pytestmark = pytest.mark.heavy

BANNED, DRAWS, VOCABULARY = (2, 5), 400, 8


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(bias: dict[int, float] | None, mode: Any, logits: torch.Tensor) -> tuple[list[int], list[float]]:
    """Tokens that vLLM's sampler draws from `logits` [V], once a request, and the logprobs that it reports."""
    from vllm.v1.sample.logits_processor.builtin import LogitBiasLogitsProcessor
    from vllm.v1.sample.logits_processor.state import LogitsProcessors
    from vllm.v1.sample.metadata import SamplingMetadata
    from vllm.v1.sample.sampler import Sampler

    device = torch.device("cpu")
    biased = LogitBiasLogitsProcessor(None, device, False)
    if bias:
        biased.biases = {row: bias for row in range(DRAWS)}
        rows = [row for row in range(DRAWS) for _ in bias]
        biased.bias_tensor = torch.tensor([*bias.values()] * DRAWS)
        biased.logits_slice = (torch.tensor(rows), torch.tensor([*bias] * DRAWS))
    none = torch.zeros(DRAWS)
    metadata = SamplingMetadata(
        temperature=torch.ones(DRAWS),
        all_greedy=False,
        all_random=True,
        top_p=None,
        top_k=None,
        generators={},
        max_num_logprobs=0,
        no_penalties=True,
        prompt_token_ids=None,
        frequency_penalties=none,
        presence_penalties=none,
        repetition_penalties=none,
        output_token_ids=[[] for _ in range(DRAWS)],
        allowed_token_ids_mask=None,
        bad_words_token_ids={},
        logitsprocs=LogitsProcessors([biased]),
    )
    torch.manual_seed(0)
    out = Sampler(logprobs_mode=mode)(logits.repeat(DRAWS, 1), metadata)
    return out.sampled_token_ids[:, 0].tolist(), out.logprobs_tensors.logprobs[:, 0].tolist()


def params_of(sampling: Sampling) -> Any:
    return sampling_params(sampling, (), ban=False, want_text=False)


def test_bans_reach_vllm_as_biases() -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    params = params_of(Sampling(banned_token_ids=BANNED, min_tokens=3))
    assert params.logit_bias == dict.fromkeys(BANNED, -100.0)
    assert params.logprobs == 0 and params.min_tokens == 3


def test_raw_logprobs_are_of_the_distribution_without_the_ban(one_thread: None) -> None:
    bias = params_of(Sampling(banned_token_ids=BANNED)).logit_bias
    logits = torch.linspace(-1, 1, VOCABULARY)
    whole = torch.log_softmax(logits, -1)
    free, _ = drawn(None, "raw_logprobs", logits)
    assert set(free) & set(BANNED), "they would be drawn"
    tokens, raw = drawn(bias, "raw_logprobs", logits)
    assert not set(tokens) & set(BANNED) and len(set(tokens)) == VOCABULARY - len(BANNED)
    torch.testing.assert_close(torch.tensor(raw), whole[tokens])
    tokens, processed = drawn(bias, "processed_logprobs", logits)
    kept = 1 - whole[list(BANNED)].exp().sum()
    torch.testing.assert_close(torch.tensor(processed), whole[tokens] - kept.log(), rtol=1e-4, atol=1e-4)
