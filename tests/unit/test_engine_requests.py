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


OLDEST, NEWEST = "0.25.1", "0.32.0"
"""Releases of vLLM: the first has no sign for a picture that it lost, so each request carries its pixels."""


class Media:
    """Prompts with a picture; says what was asked to be sent."""

    tokens = frozenset({PICTURE})

    def __init__(self) -> None:
        self.again: list[bool] = []
        self.send_all: list[bool] = []

    def engine_input(
        self, llm: Any, prompt: Any, prefix: Any, salt: str, *, send_all: bool, again: bool
    ) -> Any:
        self.send_all.append(send_all)
        self.again.append(again)
        return {}


class Front:
    """Answers each request with the next of its scripts: tokens, "error" or "stop" as its end, or an exception."""

    def __init__(self, *scripts: Sequence[Any]) -> None:
        self._scripts = list(scripts)
        self.priorities: list[int] = []

    async def generate(self, *told: Any, priority: int = 0) -> AsyncIterator[Any]:
        self.priorities.append(priority)
        for said in self._scripts.pop(0):
            if isinstance(said, Exception):
                raise said
            end = said if isinstance(said, str) else None
            ids = [] if end else [said]
            choice = SimpleNamespace(
                token_ids=ids,
                logprobs=SimpleNamespace(token_ids=ids, logprobs=[-0.5] * len(ids)),
                text="",
                finish_reason=end,
                stop_reason=None,
                routed_experts=None,
            )
            yield SimpleNamespace(outputs=[choice], num_cached_tokens=0)


async def asked(
    front: Front,
    media: Media,
    *,
    picture: bool = True,
    release: str = NEWEST,
    settings: EngineConfig | None = None,
    priority: int = 0,
) -> list[EngineDelta]:
    prompt = EnginePrompt([1, 2], media=object() if picture else None)
    request = EngineRequest("r", prompt, Sampling(max_tokens=2), salt="", priority=priority)
    engine = settings or EngineConfig()
    generation = Generation(front, media, engine, CHECKED[release])
    return [delta async for delta in generation.stream(request)]


@pytest.mark.parametrize(("release", "always"), [(OLDEST, True), (NEWEST, False)])
async def test_pixels_go_with_every_request_where_vllm_has_no_sign_for_a_lost_picture(
    release: str, always: bool
) -> None:
    media = Media()
    assert len(await asked(Front([3, 4]), media, release=release)) == 2
    assert (media.send_all, media.again) == ([always], [False])
    again = Media()
    await asked(Front(["error"], [3]), again, release=release)
    assert (again.send_all, again.again) == ([always] * 2, [False, True])


async def test_a_priority_is_vllms_in_the_second_request_too() -> None:
    front = Front(["error"], [3, 4])
    await asked(front, Media(), priority=3)
    assert front.priorities == [3, 3]


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


async def test_what_vllm_refuses_is_the_callers_mistake_and_is_not_asked_again() -> None:
    from vllm.exceptions import VLLMValidationError

    media = Media()
    with pytest.raises(OmnifleetError, match="top_k is 7000") as refused:
        await asked(Front([VLLMValidationError("top_k is 7000")]), media)
    assert refused.value.reason is Reason.INVALID_REQUEST and not refused.value.retryable
    assert media.again == [False]


async def test_a_request_that_breaks_in_vllm_is_an_engine_error_with_its_cause() -> None:
    from vllm.v1.engine.exceptions import EngineGenerateError

    broken = EngineGenerateError()
    broken.__cause__ = RuntimeError("the detokenizer broke")
    media = Media()
    with pytest.raises(OmnifleetError, match="the detokenizer broke") as failed:
        await asked(Front([3, broken]), media)
    assert failed.value.reason is Reason.ENGINE_ERROR and failed.value.retryable
    assert media.again == [False], "elsewhere, perhaps; not here"


@pytest.mark.parametrize(
    ("wanted", "missing"),
    [
        ("return_routed_experts", "no routed experts"),
        ("return_sampling_mask", "0 sampling masks for 1 token"),
    ],
)
async def test_a_reply_without_what_the_recipe_wants_returned_is_no_sample(wanted: str, missing: str) -> None:
    settings = EngineConfig.model_validate({wanted: True})
    with pytest.raises(OmnifleetError, match=missing) as failed:
        await asked(Front([3, "stop"]), Media(), settings=settings)
    assert failed.value.reason is Reason.ENGINE_ERROR and failed.value.retryable


def test_a_placeholder_ends_the_reply_and_is_banned_only_if_told() -> None:
    stops = sampling_params(Sampling(stop_token_ids=(9,)), Media.tokens, ban=False, want_text=False)
    assert sorted(stops.stop_token_ids) == [PICTURE, 9] and stops.logit_bias is None
    banned = sampling_params(Sampling(), Media.tokens, ban=True, want_text=False)
    assert banned.logit_bias == {PICTURE: -100.0}
