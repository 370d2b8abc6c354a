"""A request to vLLM and its replies: what is asked again, what is an error, what ends a reply. The front end here is scripted."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from omnifleet.config.services import EngineConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Sampling
from omnifleet_rollout.engine.port import EngineDelta, EnginePrompt, EngineRequest
from omnifleet_rollout.engine.vllm_compat import CHECKED
from omnifleet_rollout.engine.vllm_generation import Generation, sampling_params

pytestmark = pytest.mark.heavy

PICTURE = 7
"""Its placeholder."""


class Media:
    """Prompts with a picture; says what was asked to be sent."""

    tokens = frozenset({PICTURE})

    def __init__(self) -> None:
        self.again: list[bool] = []

    def engine_input(
        self, llm: Any, prompt: Any, prefix: Any, salt: str, *, send_all: bool, again: bool
    ) -> Any:
        assert not send_all, "this release says when a picture is missing"
        self.again.append(again)
        return {}


class Front:
    """Answers each request with the next of its scripts: tokens, "error", or an exception."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self._scripts = list(scripts)

    async def generate(self, *told: Any, **named: Any) -> AsyncIterator[Any]:
        for said in self._scripts.pop(0):
            if isinstance(said, Exception):
                raise said
            ids = [] if said == "error" else [said]
            choice = SimpleNamespace(
                token_ids=ids,
                logprobs=SimpleNamespace(token_ids=ids, logprobs=[-0.5] * len(ids)),
                text="",
                finish_reason="error" if said == "error" else None,
                stop_reason=None,
                routed_experts=None,
            )
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=0)


async def asked(front: Front, media: Media, *, picture: bool = True) -> list[EngineDelta]:
    prompt = EnginePrompt([1, 2], media=object() if picture else None)
    request = EngineRequest("r", prompt, Sampling(max_tokens=2), salt="")
    generation = Generation(front, media, EngineConfig(), CHECKED["0.32.0"])  # type: ignore[arg-type]
    return [delta async for delta in generation.stream(request)]


async def test_a_request_whose_picture_was_dropped_is_made_once_more_with_the_pixels() -> None:
    media = Media()
    deltas = await asked(Front(["error"], [3, 4]), media)
    assert [delta.token_ids for delta in deltas] == [[3], [4]]
    assert media.again == [False, True]


@pytest.mark.parametrize(
    ("scripts", "picture", "reason", "requests"),
    [
        ([["error"], ["error"]], True, Reason.ENGINE_ERROR, 2),
        ([["error"]], False, Reason.ENGINE_ERROR, 1),
        ([[3, "error"]], True, Reason.ENGINE_ERROR, 1),
    ],
    ids=["twice", "without a picture", "after a token"],
)
async def test_other_errors_of_the_engine_are_the_samples(
    scripts: list[list[Any]], picture: bool, reason: Reason, requests: int
) -> None:
    media = Media()
    with pytest.raises(OmnifleetError) as failed:
        await asked(Front(*scripts), media, picture=picture)
    assert failed.value.reason is reason and failed.value.retryable and len(media.again) == requests


async def test_an_engine_that_dies_loses_the_worker() -> None:
    from vllm.v1.engine.exceptions import EngineDeadError

    with pytest.raises(OmnifleetError) as failed:
        await asked(Front([3, EngineDeadError()]), Media())
    assert failed.value.reason is Reason.WORKER_LOST and failed.value.retryable


def test_a_placeholder_ends_the_reply_and_is_banned_only_if_told() -> None:
    stops = sampling_params(Sampling(stop_token_ids=(9,)), Media.tokens, ban=False, want_text=False)
    assert sorted(stops.stop_token_ids) == [PICTURE, 9] and stops.logit_bias is None
    banned = sampling_params(Sampling(), Media.tokens, ban=True, want_text=False)
    assert banned.logit_bias == {PICTURE: -100.0}
