"""Tokens that nobody waits for: held back by vLLM's front, handed over at a gate, never lost. Its own classes, no engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.vllm_generation import delta_of

pytestmark = pytest.mark.heavy


class Front:
    """vLLM's output processor with one request, fed by hand."""

    def __init__(self) -> None:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind
        from vllm.v1.engine import EngineCoreRequest
        from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector

        params = SamplingParams(
            logprobs=0, flat_logprobs=True, detokenize=False, output_kind=RequestOutputKind.DELTA
        )
        request = EngineCoreRequest(
            request_id="inside",
            external_req_id="mine",
            prompt_token_ids=[1, 2],
            mm_features=None,
            sampling_params=params,
            pooling_params=None,
            arrival_time=0.0,
            lora_request=None,
            cache_salt=None,
            data_parallel_rank=None,
        )
        self.processor = OutputProcessor(None, log_stats=False)
        self.queue = RequestOutputCollector(RequestOutputKind.DELTA, "inside")
        self.processor.add_request(request, None, queue=self.queue)
        self.engine = SimpleNamespace(output_processor=self.processor)
        self.read: list[int] = []
        self.logprobs: list[float] = []

    def step(self, token: int) -> None:
        """The engine made one token."""
        from vllm.v1.engine import EngineCoreOutput
        from vllm.v1.outputs import LogprobsLists

        lists = LogprobsLists(np.array([[token]]), np.array([[-token / 10]], np.float64), np.array([1]), None)
        self.processor.process_outputs([EngineCoreOutput("inside", [token], new_logprobs=lists)])

    def take(self) -> Any:
        """What its reader gets now, through our adapter; None if nothing is there."""
        output = self.queue.get_nowait()
        if output is None:
            return None
        delta = delta_of(output.outputs[0], 0)
        self.read += delta.token_ids
        self.logprobs += delta.logprobs
        return delta


def begun(tokens: int) -> Front:
    front = Front()
    front.step(3)
    assert front.take().token_ids == [3], "the first token is never held back"
    seams.hold_back(front.engine, "mine", tokens)
    return front


def test_they_come_some_at_a_time() -> None:
    front = begun(3)
    for token in (4, 5):
        front.step(token)
        assert front.take() is None
    front.step(6)
    delta = front.take()
    assert (delta.token_ids, delta.logprobs) == ([4, 5, 6], [-0.4, -0.5, -0.6])


def test_at_a_gate_all_are_handed_over_and_the_count_begins_again() -> None:
    front = begun(3)
    front.step(4)
    seams.hand_over(front.engine)
    assert front.take().token_ids == [4]
    seams.hand_over(front.engine)
    assert front.take() is None, "there was nothing to hand over"
    for token in (5, 6):
        front.step(token)
        assert front.take() is None
    front.step(7)
    assert front.take().token_ids == [5, 6, 7]


def test_logprobs_of_other_tokens_are_an_error() -> None:
    front = begun(1)
    front.step(4)
    front.queue.output.outputs[0].token_ids = [5]
    with pytest.raises(OmnifleetError) as failed:
        front.take()
    assert failed.value.reason is Reason.ENGINE_ERROR and failed.value.retryable


def test_an_abort_brings_what_was_held_back() -> None:
    front = begun(16)
    front.step(4)
    front.processor.abort_requests(["mine"], internal=False)
    delta = front.take()
    assert (delta.token_ids, delta.logprobs, delta.finish) == ([4], [-0.4], "abort")


def test_an_abort_right_after_a_hand_over_brings_nothing_twice() -> None:
    front = begun(16)
    front.step(4)
    seams.hand_over(front.engine)
    front.processor.abort_requests(["mine"], internal=False)
    delta = front.take()
    assert (delta.token_ids, delta.logprobs, delta.finish) == ([4], [-0.4], "abort")


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 5), st.lists(st.sampled_from(["step", "gate", "read"]), max_size=40))
def test_whatever_happens_each_token_comes_once_and_in_order(tokens: int, steps: list[str]) -> None:
    front, made = begun(tokens), [3]
    for step in steps:
        if step == "step":
            made.append(made[-1] + 1)
            front.step(made[-1])
        elif step == "gate":
            seams.hand_over(front.engine)
            front.take()
            assert front.read == made, "after a gate nothing is held back"
        else:
            front.take()
    front.processor.abort_requests(["mine"], internal=False)
    front.take()
    assert front.read == made
    assert front.logprobs == [-token / 10 for token in made]
