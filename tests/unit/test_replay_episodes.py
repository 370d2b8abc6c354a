"""What engines say beside tokens over the turns of an episode: one sequence of it, from the gateway's word to the batch."""

from __future__ import annotations

import asyncio
import base64
import json
from dataclasses import replace
from typing import Any

import httpx
import numpy as np
import pytest
from safetensors.numpy import load

from omnifleet.config.recipe import ObjectiveConfig
from omnifleet.environments import Environment, Lost, Outcome, Scored, Session, Task, codec, process
from omnifleet.environments.codec import order_from_json, order_to_json, played_from_json, played_to_json
from omnifleet.environments.episode import following, join_turns
from omnifleet.environments.play import Order, Played, play
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Group, Identity, LogprobsMode, Sampling, Trajectory, VersionBound
from omnifleet_rollout.engine.port import EngineDelta
from omnifleet_rollout.worker.extras import Extras
from omnifleet_trainer.batch.extras import Replay, read_experts, read_kept
from omnifleet_trainer.environments.player import Player
from omnifleet_trainer.loop.batches import AdvantageRule, Batches
from omnifleet_trainer.loop.failures import RefusedSample
from omnifleet_trainer.loop.prompting import Prompter
from tests.unit.loop_world import FakeReward, FakeRollout
from tests.unit.test_environment_episode import FakeGateway, turn
from tests.unit.test_environment_player import ROW, FakeShelf, renderer

BOTH = Replay(experts=True, kept_ids=True)
SAID = [([1, 2, 3], [4, 5]), ([1, 2, 3, 4, 5, 6, 7], [8]), ([1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11, 12])]
"""Prompt and reply of each turn; 6, 7 and 9 are the environment's."""


def extras(number: int, prompt: list[int], reply: list[int], *, before: int = 0) -> dict[str, bytes]:
    """As a worker tells it: experts of the whole prompt, which turn `number` routed to expert `number` throughout."""
    found = Extras(before)
    experts = np.full((len(prompt) + len(reply) - 1, 2, 1), number, np.uint8)
    found.take(EngineDelta(reply, routed_experts=experts, sampling_mask=[[token, 99] for token in reply]))
    return {"routed_experts": found.routed_experts(), "sampling_mask": found.sampling_mask()}


def turns_of(**faults: Any) -> list[Any]:
    """The turns of `SAID` as a session holds them. faults: of the second."""
    held: list[Any] = []
    for number, (prompt, reply) in enumerate(SAID):
        said = extras(number, prompt, reply) | (faults if number == 1 else {})
        heard = replace(turn(prompt, reply, number=number), **said)
        held.append(following(heard, held[-1] if held else None))
    return held


def test_every_token_keeps_the_experts_of_the_turn_that_first_saw_it() -> None:
    whole = join_turns(turns_of())
    experts = read_experts(whole.routed_experts, len(whole.prompt_token_ids) + len(whole.token_ids))
    # 1 2 3 4 | 5 6 7 | 8 9 10 11: the last token of a reply is routed with the prompt of the next turn
    assert experts[:, 0, 0].tolist() == [0, 0, 0, 0, 1, 1, 1, 2, 2, 2, 2] and experts.shape == (11, 2, 1)
    assert experts.dtype == np.uint8


def test_masks_stand_with_replies_and_an_environment_has_none() -> None:
    whole = join_turns(turns_of())
    kept = read_kept(whole.sampling_mask, whole.token_ids)
    assert kept == [[t, 99] if own else [] for t, own in zip(whole.token_ids, whole.mask, strict=True)]


def test_a_session_holds_the_experts_of_a_token_once() -> None:
    rows = [len(load(turn.routed_experts)["routed_experts"]) for turn in turns_of()]
    assert rows == [4, 3, 4]


def test_an_episode_with_a_turn_that_lacks_something_has_nothing() -> None:
    for name in ("routed_experts", "sampling_mask"):
        assert getattr(join_turns(turns_of(**{name: b""})), name) == b""
    begun_elsewhere = join_turns(turns_of(sampling_mask=extras(1, *SAID[1], before=2)["sampling_mask"]))
    with pytest.raises(OmnifleetError, match="first 2 tokens") as refused:
        read_kept(begun_elsewhere.sampling_mask, begun_elsewhere.token_ids)
    assert refused.value.retryable


def test_what_cannot_be_read_or_is_of_two_models_is_corrupt() -> None:
    other = np.zeros((7, 3, 1), np.uint8)
    found = Extras(0)
    found.take(EngineDelta([], routed_experts=other))
    for faults, words in (
        ({"routed_experts": b"no tensors"}, "cannot be read"),
        ({"sampling_mask": found.routed_experts()}, "lacks token_ids"),
        ({"routed_experts": found.routed_experts()}, "different shape"),
    ):
        with pytest.raises(OmnifleetError, match=words) as refused:
            join_turns(turns_of(**faults))
        assert refused.value.reason is Reason.CORRUPT


class Twice(Environment):
    async def run(self, session: Session) -> Outcome:
        await session.ask("hello")
        await session.ask("go on")
        return Scored(1.0)


class Telling(FakeGateway):
    """Adds what was asked for to each reply. lacks: what the second reply comes without."""

    def __init__(self, lacks: str = "") -> None:
        super().__init__()
        self.lacks = lacks

    def __call__(self, request: httpx.Request) -> httpx.Response:
        body = super().__call__(request)
        said = json.loads(body.content)
        message, asked = said["choices"][0]["message"], self.bodies[-1]
        number = len(self.bodies)
        told = extras(number, message["prompt_token_ids"], message["generation_token_ids"])
        for name, data in told.items():
            if asked.get(f"return_{name}") and not (name == self.lacks and number == 2):
                message[name] = base64.b64encode(data).decode()
        return httpx.Response(200, json=said)


async def played(order: Order, gateway: Telling) -> Played:
    transport = httpx.MockTransport(gateway)
    async with httpx.AsyncClient(base_url="http://gateway", transport=transport) as http:
        result = await play(Twice(), order, http)
    return played_from_json(json.loads(json.dumps(played_to_json(result))))  # as the pool hears of it


class Stage:
    """Plays through a gateway that tells."""

    def __init__(self, lacks: str = "") -> None:
        self.lacks, self.orders = lacks, list[Order]()

    async def play(self, order: Order) -> Played:
        assert order_from_json(json.loads(json.dumps(order_to_json(order)))) == order
        self.orders.append(order)
        return await played(order, Telling(self.lacks))


async def ask(stage: Stage, temperature: float = 1.0) -> list[Trajectory]:
    drawn = renderer()
    prompter = Prompter(
        drawn, FakeRollout(), FakeReward(), scorers=(), mode=LogprobsMode.PROCESSED, timeout_s=5.0
    )
    who = Player(
        stage, ["gym"], prompter, drawn, FakeShelf(), mode=LogprobsMode.PROCESSED, timeout_s=60.0, lease_s=60.0,
        max_tokens=100, replay=BOTH,
    )  # fmt: skip
    identity = Identity("run", prompt_id="p0", group_id="a1", attempt="a1")
    sampling = Sampling(n=2, max_tokens=8, seed=5, temperature=temperature)
    return await who.ask(ROW, identity=identity, sampling=sampling, bound=VersionBound(), lineage="a")


async def test_an_episode_trains_on_what_its_engines_chose_in_every_turn() -> None:
    stage = Stage()
    trajectories = await ask(stage)
    assert {order.extras for order in stage.orders} == {("routed_experts", "sampling_mask")}
    prompts: Any = None
    batches = Batches(prompts, renderer(), AdvantageRule(ObjectiveConfig()), BOTH)
    batch = await batches.build([Group("a1", "p0", trajectories)], step=1, version=3)
    for sample in batch.samples:
        assert sample.valid and sample.mask == [1, 1, 0, 1, 1]
        assert sample.experts is not None and sample.experts[:, 0, 0].tolist() == [1, 1, 1, 2, 2, 2]
        assert sample.kept_ids == [[60, 99], [61, 99], [], [60, 99], [61, 99]]


@pytest.mark.parametrize("lacks", ["routed_experts", "sampling_mask"])
async def test_an_episode_one_turn_of_which_lacks_something_is_tried_again(lacks: str) -> None:
    with pytest.raises(RefusedSample) as refused:
        await ask(Stage(lacks))
    assert (refused.value.check, refused.value.retryable) == (lacks, True)


async def test_greedy_episodes_are_asked_for_nothing() -> None:
    stage = Stage()
    trajectories = await ask(stage, temperature=0.0)
    assert {order.extras for order in stage.orders} == {()}
    assert {(t.routed_experts, t.sampling_mask) for t in trajectories} == {(b"", b"")}


async def test_a_reply_whose_extras_are_no_base64_is_lost() -> None:
    class Broken(Telling):
        def __call__(self, request: httpx.Request) -> httpx.Response:
            said = json.loads(super().__call__(request).content)
            said["choices"][0]["message"]["routed_experts"] = "not base64!"
            return httpx.Response(200, json=said)

    order = Order("gym", Task("t", "x"), Identity("run"), Sampling(), VersionBound(), 60.0, extras=BOTH.names)
    result = await asyncio.wait_for(played(order, Broken()), 60)
    assert isinstance(result.outcome, Lost) and result.outcome.error.reason is Reason.CORRUPT


def test_an_episode_too_large_for_a_frame_is_no_crash_of_its_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = join_turns(turns_of())
    monkeypatch.setattr(codec, "LIMIT_BYTES", 400)
    data = process.Stage._answer(1, Played(Scored(1.0), whole))
    back = played_from_json(json.loads(data[4:]))
    assert isinstance(back.outcome, Lost) and back.outcome.error.reason is Reason.LIMIT_EXCEEDED
