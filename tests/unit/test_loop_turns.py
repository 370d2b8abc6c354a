"""The loop on shared devices: nothing trains while engines generate, nothing generates while the policy trains."""

from __future__ import annotations

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.load import recipe_from_mapping
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Generation
from tests.unit.loop_world import FakeRollout, world


class Devices:
    """Turns over the fake rollout: a reply that comes while the engines sleep waits for them.

    slow: every third reply is still under way when the next turn comes.
    """

    def __init__(self, rollout: FakeRollout, *, slow: bool = False) -> None:
        self.slow = slow
        self.awake, self.asleep = asyncio.Event(), asyncio.Event()
        self.awake.set()
        self.said: list[str] = []
        self.waited = self.calls = 0
        self.fails: OmnifleetError | None = None
        rollout.behave = self.answer

    async def answer(self, identity: Any, answer: Generation) -> None:
        self.calls += 1
        if self.slow and self.calls % 3 == 0:
            await self.asleep.wait()
        self.waited += not self.awake.is_set()
        await self.awake.wait()

    async def train(self) -> dict[str, float]:
        if self.fails:
            raise self.fails
        self.awake.clear()
        self.asleep.set()
        self.said.append("train")
        await asyncio.sleep(0)
        return {"turn/sleep_s": 0.1}

    async def refit(self) -> dict[str, float]:
        self.said.append("refit")
        return {}

    async def generate(self) -> dict[str, float]:
        self.said.append("generate")
        self.asleep.clear()
        self.awake.set()
        return {"turn/wake_s": 0.2}


@pytest.mark.parametrize("budget", [0, 2])
async def test_the_loop_is_the_same_with_turns(tmp_path: Path, budget: int) -> None:
    found: list[Devices] = []

    def turns(rollout: FakeRollout) -> Devices:
        found.append(Devices(rollout, slow=budget > 0))
        return found[-1]

    with world(tmp_path, turns=turns, steps=4, max_staleness=budget) as w:
        (devices,) = found
        train = w.policy.train

        def checked(batch: Any) -> dict[str, float]:
            assert not devices.awake.is_set(), "the engines sleep while the policy trains"
            return train(batch)

        w.policy.train = checked  # type: ignore[method-assign]
        assert await w.controller.run()
        # The first refit brings the engines the weights that the run begins with.
        assert devices.said == ["refit", "generate", *(["train", "refit", "generate"] * 4)]
        assert (devices.waited > 0) == (budget > 0), (
            "with a budget, replies are under way when the turn comes"
        )
        assert w.journal.values("turn/sleep_s") == [0.1] * 4
        assert len(w.journal.values("turn/wake_s")) == 5
        trained = Counter(s.trajectory_id for batch in w.policy.trained for s in batch.samples)
        assert len(trained) == 4 * 2 * 2 and set(trained.values()) == {1}
        assert max(w.journal.values("lag_max")) <= budget


async def test_engines_wake_without_new_weights_between_refits(tmp_path: Path) -> None:
    found: list[Devices] = []

    def turns(rollout: FakeRollout) -> Devices:
        found.append(Devices(rollout))
        return found[-1]

    with world(tmp_path, turns=turns, steps=2, max_staleness=1, refit_every=2) as w:
        assert await w.controller.run()
        assert found[0].said == ["refit", "generate", "train", "generate", "train", "refit", "generate"]


async def test_devices_that_do_not_change_hands_end_the_run_with_the_reason(tmp_path: Path) -> None:
    def turns(rollout: FakeRollout) -> Devices:
        devices = Devices(rollout)
        devices.fails = retryable(Reason.DEADLINE, "late", knob="trainer.turn_timeout_s")
        return devices

    with world(tmp_path, turns=turns, steps=2) as w:
        with pytest.raises(OmnifleetError) as ended:
            await w.controller.run()
        assert ended.value.knob == "trainer.turn_timeout_s"
    with world(tmp_path, steps=2) as w:  # what it had consumed comes back with the resume
        assert await w.controller.run()
        assert w.ledger.counts().consumed_twice == 0 and w.ledger.counts().lost == 0


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"refit": {"transport": "nccl"}}, "cuda_ipc or shm"),
        ({"refit": {"canary": {}}}, "leave refit.canary out"),
        ({"rollout": {"kv_after_refit": "drain"}}, "finish nothing"),
        ({"rollout": {"kv_after_refit": "keep"}}, "drops KV"),
        ({"refit": {"without_shadow": "refuse"}}, "gains nothing by refusing"),
        ({"rollout": {"sleep_level": 2}, "trainer": {"refit_every": 2, "max_staleness": 1}}, "drops weights"),
    ],
)
def test_what_cannot_be_in_turns_is_refused_with_the_knob(settings: dict[str, Any], says: str) -> None:
    body = {"run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}], **settings}
    body["rollout"] = {"sleep_level": 1, **settings.get("rollout", {})}
    with pytest.raises(OmnifleetError, match=says):
        recipe_from_mapping(body, "test")


def test_a_recipe_takes_turns_only_where_it_says_so() -> None:
    body = {"run": {"name": "r"}, "model": {"path": "tiny"}, "reward": [{"name": "format"}]}
    assert not recipe_from_mapping(body, "test").colocated
    assert recipe_from_mapping(
        {**body, "rollout": {"sleep_level": 0, "kv_after_refit": "keep"}}, "test"
    ).colocated
