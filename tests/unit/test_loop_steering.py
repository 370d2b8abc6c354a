"""Pause, resume, stop and time limits of a run, against fake services."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from omnifleet.errors import OmnifleetError
from omnifleet.types import Generation, Identity
from omnifleet_trainer.loop.admission import Admission
from tests.unit.loop_world import world


async def test_pause_stops_steps_and_resume_goes_on(tmp_path: Path) -> None:
    with world(tmp_path, steps=6) as w:
        task = asyncio.create_task(w.controller.run())
        async for record in w.journal.follow(-1, live=True):
            if record.step == 2:
                break
        w.controller.pause()
        assert w.controller.state == "paused"
        paused_at = await _settled(w)
        assert paused_at < 6
        assert (await w.controller.checkpoint(timeout=5))[1] == paused_at
        w.controller.resume()
        assert await asyncio.wait_for(task, 10)
    assert len(w.policy.trained) == 6


async def _settled(w: object) -> int:
    """The step at which nothing moves any more."""
    controller = w.controller  # type: ignore[attr-defined]
    step = -1
    while step != controller.step or controller._policy_rests.locked():
        step = controller.step
        for _ in range(200):
            await asyncio.sleep(0)
    return int(step)


async def test_stop_ends_after_the_step_in_hand_and_leaves_no_lease(tmp_path: Path) -> None:
    with world(tmp_path, steps=1000) as w:
        task = asyncio.create_task(w.controller.run())
        async for record in w.journal.follow(-1, live=True):
            if record.step == 2:
                break
        w.controller.stop(checkpoint=True)
        assert await asyncio.wait_for(task, 10) is False
        counts = w.ledger.counts()
        assert counts.in_flight == 0 and counts.lost == 0
        assert w.policy.trained[-1].step == w.controller.step == w.checkpoints[-1]


async def test_groups_that_do_not_come_end_the_run_with_numbers(tmp_path: Path) -> None:
    async def never(identity: Identity, answer: Generation) -> None:
        await asyncio.Event().wait()

    with world(tmp_path, step_timeout_s=0.3) as w:
        w.rollout.behave = never
        with pytest.raises(OmnifleetError, match=r"0 of 2 groups became ready within 0 s \(4 are running\)"):
            await w.controller.run()
        assert w.ledger.counts().in_flight == 0


async def test_time_that_an_operator_took_does_not_count_against_the_fleet(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, loop, late = asyncio.Event(), asyncio.get_running_loop(), [0.0]
    clock = loop.time
    monkeypatch.setattr(loop, "time", lambda: clock() + late[0])

    async def wait(identity: Identity, answer: Generation) -> None:
        await go.wait()

    async def pass_s(seconds: float) -> None:
        """Let the loop's clock jump, and all that was due by then happen."""
        late[0] += seconds
        for _ in range(100):
            await asyncio.sleep(0)

    with world(tmp_path, steps=1, step_timeout_s=1000.0, rollout_timeout_s=10_000.0) as w:
        w.rollout.behave = wait
        task = asyncio.create_task(w.controller.run())
        while w.controller.state != "training":  # noqa: ASYNC110
            await asyncio.sleep(0)
        await pass_s(0)
        w.controller.pause()
        await pass_s(900)
        w.controller.resume()
        await pass_s(900)  # past the deadline as it was before the pause, before the new one
        assert not task.done()
        go.set()
        assert await task


async def test_groups_at_once_bounds_running_groups_within_the_budget() -> None:
    admission = Admission(bound=3, batch=4, buffer=64, version=0, trained=0, ready=0, at_once=2)
    await admission.admit()
    await admission.admit()
    assert (admission.running, admission.capacity()) == (2, 0)
    admission.accepted()
    assert admission.capacity() == 1
