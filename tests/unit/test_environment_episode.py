"""Turns to one sequence, the gateway's word to turns and errors, outcomes over the pipe."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.address import token_digest
from omnifleet.config.load import recipe_from_mapping
from omnifleet.environments import (
    Crashed,
    Environment,
    Lost,
    Outcome,
    PromptError,
    Scored,
    Session,
    Task,
    TimedOut,
    Turn,
    load_environment,
)
from omnifleet.environments.codec import order_from_json, order_to_json, played_from_json, played_to_json
from omnifleet.environments.episode import join_turns
from omnifleet.environments.outcome import Answered
from omnifleet.environments.play import Order, Played, play
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import (
    Digest,
    FinishReason,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Sampling,
    VersionBound,
    VersionSpan,
    WeightVersion,
)

Ids = list[int]
ids = st.lists(st.integers(0, 99), min_size=1, max_size=5)
FIRST, SECOND = (MediaRef(MediaKind.IMAGE, Digest(letter * 64)) for letter in "ab")


def version(number: int) -> WeightVersion:
    return WeightVersion("run", "a", number)


def turn(prompt: Ids, reply: Ids, *, number: int = 0, media: tuple[MediaRef, ...] = ()) -> Turn:
    return Turn(
        prompt,
        token_digest(prompt),
        media,
        reply,
        [-0.5] * len(reply),
        [VersionSpan(version(number), 0, len(reply), "w")],
        FinishReason.STOP,
        LogprobsMode.PROCESSED,
        f"reply {number}",
    )


@given(ids, st.lists(st.tuples(ids, ids), min_size=1, max_size=4))
def test_the_models_own_tokens_train_and_every_token_has_a_version(
    prompt: Ids, said: list[tuple[Ids, Ids]]
) -> None:
    turns, known = [], list(prompt)
    for number, (reply, between) in enumerate(said):
        turns.append(turn(list(known), reply, number=number))
        known += [*reply, *between]
    episode = join_turns(turns)
    assert episode.prompt_token_ids + episode.token_ids == known[: len(known) - len(said[-1][1])]
    own = [token for token, mask in zip(episode.token_ids, episode.mask, strict=True) if mask]
    assert own == [token for reply, _ in said for token in reply]
    assert all(
        logprob == (-0.5 if mask else 0.0)
        for logprob, mask in zip(episode.logprobs, episode.mask, strict=True)
    )
    covered = [span.version.number for span in episode.spans for _ in range(span.start, span.end)]
    expected = [n for n, (reply, gap) in enumerate(said) for _ in [*reply, *gap]]
    assert covered == expected[: len(expected) - len(said[-1][1])]
    assert episode.prompt_hash == token_digest(prompt) and episode.turns == len(said)


@pytest.mark.parametrize(
    ("second", "words"),
    [
        (turn([1, 2, 3, 9], [5], media=(FIRST,)), "exact tokens"),  # another reply than was sampled
        (turn([1, 2, 3, 4], [5], media=(FIRST,)), "exact tokens"),  # nothing was said in between
        (turn([1, 2, 3, 4, 8], [5], media=(SECOND,)), "other media"),
        (replace(turn([1, 2, 3, 4, 8], [5], media=(FIRST,)), prompt_hash="x"), "another prompt"),
        (
            replace(turn([1, 2, 3, 4, 8], [5], media=(FIRST,)), logprobs_mode=LogprobsMode.RAW),
            "raw logprobs",
        ),
    ],
)
def test_turns_that_are_not_one_sequence_are_refused(second: Turn, words: str) -> None:
    with pytest.raises(OmnifleetError, match=words) as caught:
        join_turns([turn([1, 2], [3, 4], media=(FIRST,)), second])
    assert caught.value.reason is Reason.CORRUPT


class Greets(Environment):
    async def run(self, session: Session) -> Outcome:
        match session.task.text:
            case "raise":
                raise KeyError("state")
            case "silent":
                return Scored(1.0)
            case "refuse":
                return PromptError("no")
            case "nothing":
                return None  # type: ignore[return-value]
            case "wait":
                await asyncio.Event().wait()
            case "infinite":
                await session.ask("hello")
                return Scored(float("inf"))
        first = await session.ask("hello", b"picture")
        second = await session.ask(f"you said {first.text}")
        return Scored(0.5, {"turns": float(session.turns), "tokens": float(second.tokens)})


def order(text: str, timeout_s: float = 60.0) -> Order:
    bound = VersionBound(min=version(3))
    sampling = Sampling(max_tokens=9, seed=7)
    return Order("greets", Task("t", text), Identity("run", session="s"), sampling, bound, timeout_s)


class FakeGateway:
    """Extends the prompt by what is new; refuses the first calls with what it is given."""

    def __init__(self, *refusals: httpx.Response) -> None:
        self.refusals, self.bodies = list(refusals), list[Any]()
        self.known: Ids = [1]

    def __call__(self, request: httpx.Request) -> httpx.Response:
        self.bodies.append(json.loads(request.content))
        if self.refusals:
            return self.refusals.pop(0)
        self.known = [*self.known, 50]
        message = {
            "role": "assistant",
            "content": "hi",
            "prompt_token_ids": list(self.known),
            "generation_token_ids": [60, 61],
            "generation_log_probs": [-0.5, -0.25],
        }
        spans = [{"version": "run/a:3", "start": 0, "end": 2, "worker": "w"}]
        origin = {
            "prompt_hash": token_digest(self.known),
            "logprobs_mode": "processed",
            "media": [{"kind": "image", "digest": "a" * 64}],
        }
        self.known += [60, 61]
        choice = {"message": message, "finish_reason": "stop", "omnifleet": {"weight_versions": spans}}
        return httpx.Response(200, json={"choices": [choice], "omnifleet": origin})


async def played(text: str, gateway: FakeGateway, timeout_s: float = 60.0) -> Played:
    transport = httpx.MockTransport(gateway)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as http:
        return await play(Greets(), order(text, timeout_s), http)


def refusal(status: int, code: str, **headers: str) -> httpx.Response:
    error = {"code": code, "message": "said why", "retryable": status in (429, 503), "knob": "some.knob"}
    return httpx.Response(status, json={"error": error}, headers=headers)


async def test_an_episode_is_scored_and_pictures_travel_once() -> None:
    gateway = FakeGateway()
    result = await played("play", gateway)
    assert result.outcome == Scored(0.5, {"turns": 2.0, "tokens": 2.0})
    assert result.episode is not None and result.episode.mask == [1, 1, 0, 1, 1]
    first, second = gateway.bodies
    assert first["messages"][0]["content"][1]["image_url"]["url"].startswith("data:image/png;base64,")
    assert second["messages"][0]["content"][1]["image_url"]["url"] == "media://" + "a" * 64
    assert second["messages"][1] == {"role": "assistant", "content": "hi"}
    assert (first["weight_version"], first["seed"], second["seed"]) == ({"min": "run/a:3"}, 7, 8)
    assert first["identity"]["session"] == "s" and second["identity"]["turn"] == 1


async def test_a_busy_gateway_is_waited_for_as_it_advises() -> None:
    busy = [refusal(429, "overloaded", **{"retry-after": "0.1"}), refusal(503, "no_worker")]
    gateway = FakeGateway(*busy)
    began = asyncio.get_running_loop().time()
    result = await played("play", gateway)
    assert isinstance(result.outcome, Scored) and len(gateway.bodies) == 4
    assert asyncio.get_running_loop().time() - began >= 0.1


async def test_what_the_services_refuse_is_lost_and_keeps_its_reason() -> None:
    result = await played("play", FakeGateway(refusal(409, "version_moved")))
    assert isinstance(result.outcome, Lost) and result.outcome.error.reason is Reason.VERSION_MOVED
    assert result.outcome.error.knob == "some.knob"
    result = await played("play", FakeGateway(httpx.Response(502, text="bad gateway")))
    assert isinstance(result.outcome, Lost) and result.outcome.error.retryable
    result = await played("play", FakeGateway(httpx.Response(200, json={"choices": []})))
    assert isinstance(result.outcome, Lost) and result.outcome.error.reason is Reason.CORRUPT


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("raise", Crashed),
        ("silent", Crashed),
        ("nothing", Crashed),
        ("infinite", Crashed),
        ("refuse", PromptError),
        ("wait", TimedOut),
    ],
)
async def test_no_other_end_becomes_a_reward(text: str, kind: type[Outcome]) -> None:
    result = await played(text, FakeGateway(), timeout_s=0.2 if text == "wait" else 60.0)
    assert type(result.outcome) is kind and result.episode is None


@pytest.mark.parametrize(
    "outcome",
    [
        Scored(0.25, {"part": 1.0}),
        Answered("text"),
        PromptError("bad"),
        Crashed("KeyError: 1"),
        TimedOut(3.0),
        Lost(OmnifleetError(Reason.OVERLOADED, "full", retryable=True, knob="k", retry_after_ms=20)),
    ],
)
def test_outcomes_and_episodes_cross_the_pipe_unchanged(outcome: Outcome) -> None:
    episode = join_turns([turn([1, 2], [3, 4], media=(FIRST,))])
    back = played_from_json(json.loads(json.dumps(played_to_json(Played(outcome, episode)))))
    assert back.episode == episode and type(back.outcome) is type(outcome)
    if isinstance(outcome, Lost) and isinstance(back.outcome, Lost):
        assert str(back.outcome.error) == str(outcome.error) and back.outcome.error.retry_after_ms == 20
    else:
        assert back.outcome == outcome


def test_orders_cross_the_pipe_unchanged() -> None:
    sent = replace(order("play"), task=Task("t", "x", extra={"a": [1, {"b": None}]}, media=(FIRST,)))
    assert order_from_json(json.loads(json.dumps(order_to_json(sent)))) == sent
    with pytest.raises(OmnifleetError, match="media service"):
        order_to_json(replace(sent, task=Task("t", "x", pictures=(b"p",))))


@pytest.mark.parametrize(
    ("path", "params", "words"),
    [
        ("nowhere", {}, "module:Class"),
        ("nowhere_at_all:X", {}, "Python path"),
        ("json:JSONDecoder", {}, "no Environment"),
        (f"{__name__}:Greets", {"level": 3}, "level"),
    ],
)
def test_an_environment_that_cannot_be_loaded_says_why(path: str, params: dict[str, Any], words: str) -> None:
    with pytest.raises(OmnifleetError, match=words) as caught:
        load_environment(path, params)
    assert caught.value.reason is Reason.INVALID_CONFIG


def test_a_set_with_an_environment_and_no_data_set_brings_its_own_tasks() -> None:
    body: dict[str, Any] = {
        "run": {"name": "t"},
        "model": {"path": "tiny"},
        "reward": [{"name": "format"}],
        "data": {
            "train": {"environment": "gym:Gym", "params": {"level": 2}},
            "heldout": {"environment": "gym:Gym", "params": {"level": 2}, "split": "val"},
        },
    }
    train = recipe_from_mapping(body, "test").data.train_sets[0]
    assert (train.dataset, train.task_name) == ("environment", "gym:Gym")
    body["data"]["heldout"]["params"] = {"level": 3}
    with pytest.raises(OmnifleetError, match="two environments"):
        recipe_from_mapping(body, "test")
    with pytest.raises(OmnifleetError, match="none is named"):
        recipe_from_mapping({**body, "data": {"train": {"params": {"a": 1}}}}, "test")
