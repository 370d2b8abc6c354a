"""`trainer.save_by_s`: a job that will be cut off saves in time, and the next job goes on."""

from __future__ import annotations

from pathlib import Path

from tests.unit.loop_world import World, world


class Clock:
    """10 s a trained step, as far as the loop can see."""

    def __init__(self) -> None:
        self.world: World | None = None

    def __call__(self) -> float:
        return 10.0 * len(self.world.policy.trained) if self.world else 0.0


async def test_a_run_saves_and_ends_before_a_step_that_might_not_fit(tmp_path: Path) -> None:
    clock = Clock()
    with world(tmp_path, steps=50, checkpoint_every=50, save_by_s=45.0, clock=clock) as w:
        clock.world = w
        assert not await w.controller.run()
    # After 4 steps 40 s are spent: a fifth of 10 s would end at 50 s.
    assert len(w.policy.trained) == 4 and w.checkpoints == [4]


async def test_the_next_life_of_the_run_goes_on_from_there(tmp_path: Path) -> None:
    for resume_at in (0, 2):
        clock = Clock()
        with world(
            tmp_path,
            steps=4,
            checkpoint_every=50,
            save_by_s=25.0 if not resume_at else None,
            clock=clock,
            resume_at=resume_at,
        ) as w:
            clock.world = w
            done = await w.controller.run()
    assert done
    assert w.ledger is not None and w.checkpoints == [4]
    assert len(w.policy.trained) == 2
