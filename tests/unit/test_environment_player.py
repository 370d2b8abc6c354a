"""A row through its environment into the loop: what every end of an episode means for the group, and what the batch holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from omnifleet.address import token_digest
from omnifleet.config.recipe import ObjectiveConfig
from omnifleet.environments import Answered, Crashed, Lost, PromptError, Scored, TimedOut
from omnifleet.environments.episode import Episode
from omnifleet.environments.outcome import Outcome as Ending
from omnifleet.environments.play import Order, Played
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import ImageProcessorSpec
from omnifleet.types import (
    Digest,
    Group,
    Identity,
    Lease,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Outcome,
    Sampling,
    Trajectory,
    VersionBound,
    VersionSpan,
    WeightVersion,
)
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_to_wire
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.data import PromptRow
from omnifleet_trainer.environments.player import Player
from omnifleet_trainer.ledger import SqliteLedger
from omnifleet_trainer.loop.batches import AdvantageRule, Batches
from omnifleet_trainer.loop.failures import outcome_of, tries_of
from omnifleet_trainer.loop.prompting import Prompter
from omnifleet_trainer.rendering import Renderer
from tests.unit.loop_world import FEATURES, IMAGE, FakePictures, FakeReward, FakeRollout, FakeTemplate

V0 = WeightVersion("run", "a", 0)
MADE = MediaRef(MediaKind.IMAGE, Digest("e" * 64))
ROW = PromptRow("p0", "what?", (b"picture",), "yes", "gym", {"level": 3})


def episode(sample: int, first: MediaRef, **changes: Any) -> Episode:
    """Two replies; between them the environment shows a picture of its own."""
    prompt = [*[IMAGE] * FEATURES, 5]
    shown = [*[IMAGE] * FEATURES, 6]
    whole = Episode(
        prompt,
        token_digest(prompt),
        (first, replace(MADE, digest=Digest(f"{sample:x}" * 64))),
        [10, 11, *shown, 12],
        [1, 1, *[0] * len(shown), 1],
        [-0.5, -0.5, *[0.0] * len(shown), -0.25],
        [VersionSpan(V0, 0, 2 + len(shown), "w"), VersionSpan(WeightVersion("run", "a", 1), 7, 8, "w")],
        text=f"reply {sample}",
        turns=2,
    )
    return replace(whole, **changes)


class FakeStage:
    def __init__(self, end: Callable[[Order], Ending], **changes: Any) -> None:
        self.end, self.changes, self.orders = end, changes, list[Order]()

    async def play(self, order: Order) -> Played:
        self.orders.append(order)
        made = episode(order.identity.sample + 1, order.task.media[0], **self.changes)
        return Played(self.end(order), made)


class FakeShelf:
    def __init__(self) -> None:
        self.leased: list[str] = []
        self.contracts: list[Any] = []

    async def put(self, data: bytes, run: str, *, kind: MediaKind, contract: Any) -> media_pb2.PutReply:
        return await self.put_url(data.decode(), run, kind=kind, contract=contract)

    async def put_url(self, url: str, run: str, *, kind: MediaKind, contract: Any) -> media_pb2.PutReply:
        self.contracts.append((url, contract))
        return media_pb2.PutReply(ref=media_to_wire(MediaRef(kind, Digest("c" * 64))))

    async def take_lease(self, digests: Iterable[str], owner: str, run: str, ttl_s: float) -> Lease:
        self.leased += digests
        return Lease("lease", owner, run, 0)


def renderer(clips: ImageProcessorSpec | None = None, sounds: ImageProcessorSpec | None = None) -> Renderer:
    spec = ImageProcessorSpec("Fake", {})
    settings: dict[str, Any] = {"placeholder": IMAGE, "run": "run", "max_prompt_tokens": 100}
    return Renderer(FakeTemplate(), FakePictures(), spec, clips=clips, sounds=sounds, **settings)


def player(
    stage: FakeStage, shelf: FakeShelf | None = None, *, max_tokens: int = 100, **options: Any
) -> Player:
    drawn = renderer(**options)
    prompter = Prompter(
        drawn, FakeRollout(), FakeReward(), scorers=(), mode=LogprobsMode.PROCESSED, timeout_s=5.0
    )
    return Player(
        stage,
        ["gym"],
        prompter,
        drawn,
        shelf or FakeShelf(),
        mode=LogprobsMode.PROCESSED,
        timeout_s=5.0,
        lease_s=60.0,
        max_tokens=max_tokens,
        clips=media_pb2.DecodeContract(sampling="uniform@1"),
        sounds=media_pb2.DecodeContract(sampling="audio@1", sample_rate=16_000),
    )


async def ask(who: Player, row: PromptRow = ROW, n: int = 3) -> list[Trajectory]:
    identity = Identity("run", session="a1", prompt_id=row.prompt_id, group_id="a1", attempt="a1")
    sampling = Sampling(n=n, max_tokens=8, seed=5)
    return await who.ask(row, identity=identity, sampling=sampling, bound=VersionBound(min=V0), lineage="a")


async def test_a_row_becomes_an_episode_a_sample_with_sessions_and_seeds_of_their_own() -> None:
    stage, shelf = FakeStage(lambda order: Scored(order.identity.sample / 4, {"part": 1.0})), FakeShelf()
    trajectories = await ask(player(stage, shelf))
    assert [t.reward for t in trajectories] == [0.0, 0.25, 0.5]
    assert [t.id for t in trajectories] == ["a1/0", "a1/1", "a1/2"]
    assert {t.reward_version for t in trajectories} == {"environment:gym"}
    assert trajectories[0].mask == [1, 1, 0, 0, 0, 0, 0, 1] and trajectories[0].components == {"part": 1.0}
    assert (
        len({order.identity.session for order in stage.orders})
        == 3
        == len({order.sampling.seed for order in stage.orders})
    )
    assert {(o.sampling.n, o.dice, o.task.extra["level"]) for o in stage.orders} == {(1, 5, 3)}
    assert len(shelf.leased) == 4  # the row's picture, and one that each episode made


async def test_the_recipes_scorers_judge_what_an_environment_only_answers() -> None:
    trajectories = await ask(player(FakeStage(lambda _: Answered("text"))))
    assert [t.reward for t in trajectories] == [0.0, 0.1, 0.2]  # as FakeReward says
    assert {t.reward_version for t in trajectories} == {"exact@1"}


async def test_rows_of_other_tasks_are_asked_in_one_turn() -> None:
    stage = FakeStage(lambda _: Scored(1.0))
    who = player(stage)
    row = replace(ROW, task="count")
    identity = Identity("run", prompt_id="p0", attempt="a1")
    trajectories = await who.ask(
        row, identity=identity, sampling=Sampling(n=2), bound=VersionBound(), lineage="none"
    )
    assert len(trajectories) == 2 and not stage.orders and not trajectories[0].mask
    with pytest.raises(OmnifleetError, match="only environments") as caught:
        await who.ask(
            replace(row, clips=("file:///a",)),
            identity=identity,
            sampling=Sampling(n=2),
            bound=VersionBound(),
            lineage="none",
        )
    assert caught.value.reason is Reason.UNSUPPORTED


@pytest.mark.parametrize(
    ("end", "outcome", "tries"),
    [
        (Crashed("boom"), Outcome.ENVIRONMENT_CRASH, 5),
        (PromptError("no"), Outcome.PROMPT_ERROR, 1),
        (TimedOut(3.0), Outcome.PROMPT_ERROR, 5),
        (Lost(OmnifleetError(Reason.WORKER_LOST, "gone", retryable=True)), Outcome.INFRA_ERROR, 5),
    ],
)
async def test_one_bad_end_fails_the_group_and_is_never_a_reward(
    end: Ending, outcome: Outcome, tries: int
) -> None:
    with pytest.raises(OmnifleetError) as caught:
        await ask(player(FakeStage(lambda order: end if order.identity.sample == 1 else Scored(1.0))))
    assert outcome_of(caught.value) is outcome and tries_of(caught.value, 5) == tries


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"logprobs_mode": LogprobsMode.RAW}, Reason.LOGPROBS_MODE),
        ({"spans": [VersionSpan(V0, 0, 3)]}, Reason.INVALID_REQUEST),
        ({"spans": [VersionSpan(WeightVersion("run", "old", 0), 0, 8)]}, Reason.VERSION_MOVED),
        ({"logprobs": [float("nan")] * 8}, Reason.INVALID_REQUEST),
    ],
)
async def test_an_episode_that_must_not_train_is_refused(changes: dict[str, Any], reason: Reason) -> None:
    with pytest.raises(OmnifleetError) as caught:
        await ask(player(FakeStage(lambda _: Scored(1.0), **changes)))
    assert caught.value.reason is reason


async def test_an_episode_longer_than_a_micro_batch_is_refused() -> None:
    with pytest.raises(OmnifleetError, match="13 tokens, at most 12") as caught:
        await ask(player(FakeStage(lambda _: Scored(1.0)), max_tokens=12))
    assert outcome_of(caught.value) is Outcome.PROMPT_ERROR


async def test_clips_of_a_row_are_placed_under_the_runs_contract_and_sounds_refused() -> None:
    stage, shelf = FakeStage(lambda _: Scored(1.0)), FakeShelf()
    row = replace(ROW, clips=("file:///clip.mp4", "media://" + "d" * 64, "data:video/mp4;base64,AA=="))
    await ask(player(stage, shelf, clips=ImageProcessorSpec("FakeClips", {})), row)
    assert [ref.kind for ref in stage.orders[0].task.media] == [MediaKind.IMAGE, *[MediaKind.VIDEO] * 3]
    assert stage.orders[0].task.media[2].digest == "d" * 64
    assert [contract.sampling for _, contract in shelf.contracts] == ["uniform@1"] * 2
    for wrong in (replace(ROW, sounds=("file:///a.wav",)), row):
        with pytest.raises(OmnifleetError, match="trained on no") as caught:
            await ask(player(FakeStage(lambda _: Scored(1.0))), wrong)
        assert caught.value.reason is Reason.UNSUPPORTED


async def test_sounds_of_a_row_are_placed_where_the_model_hears() -> None:
    """A row of avqa: its sound comes as a data URL, and is decoded at the rate of the model."""
    stage, shelf = FakeStage(lambda _: Scored(1.0)), FakeShelf()
    row = replace(ROW, images=(), sounds=("data:audio/wav;base64,AA==", "media://" + "d" * 64))
    await ask(player(stage, shelf, sounds=ImageProcessorSpec("FakeSounds", {})), row)
    assert [ref.kind for ref in stage.orders[0].task.media] == [MediaKind.AUDIO] * 2
    ((url, contract),) = shelf.contracts
    assert url == row.sounds[0] and (contract.sampling, contract.sample_rate) == ("audio@1", 16_000)


async def test_the_batch_has_masks_versions_and_media_of_each_episode_after_the_ledger(
    tmp_path: Path,
) -> None:
    trajectories = await ask(player(FakeStage(lambda order: Scored(float(order.identity.sample)))), n=2)
    ledger = SqliteLedger(tmp_path / "ledger.sqlite", owner="test")
    try:
        ledger.roll_back_to(0, "a")
        ledger.add_epoch(0, ["p0"])
        (lease,) = ledger.lease_next(1, version=0, ttl_s=60)
        ledger.record_group(lease, Group(lease.attempt, "p0", trajectories))
        group = ledger.load_group(lease.attempt)
    finally:
        ledger.close()
    assert group.trajectories == trajectories
    prompts: Any = None  # episodes are not rendered again
    batches = Batches(prompts, renderer(), AdvantageRule(ObjectiveConfig()))
    batch = await batches.build([group], step=2, version=1)
    check_batch(batch)
    for sample, trajectory in zip(batch.samples, trajectories, strict=True):
        assert sample.mask == trajectory.mask and sample.lag == [*[1] * 7, 0]
        assert sample.media == trajectory.media and len(sample.segment_keys) == 2
    assert len(batch.segments) == 3  # one picture is shared
    assert batch.samples[0].advantage < 0 < batch.samples[1].advantage
