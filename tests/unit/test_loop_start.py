"""What a run takes over from its earlier lives: its recipe, its journal, its data."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WeightVersion
from omnifleet_trainer.checkpoint import CheckpointState, write_checkpoint
from omnifleet_trainer.ledger import SqliteLedger
from omnifleet_trainer.ledger.port import Rollback
from omnifleet_trainer.loop.changes import keep_recipe, recipe_digest
from omnifleet_trainer.loop.journal import Journal, StepRecord
from omnifleet_trainer.loop.start import LEDGER, find_start, resumed_in_words
from tests.unit.loop_world import rows, world
from tests.unit.small_run import small_recipe


def recipe_of(folder: Path, **trainer: object) -> Recipe:
    return small_recipe(folder, trainer=trainer)


def checkpointed(folder: Path, recipe: Recipe) -> None:
    """A run of no steps with a checkpoint."""

    def save(into: Path) -> None:
        ledger = SqliteLedger(folder / LEDGER, owner="test")
        ledger.roll_back_to(0, "first")
        ledger.backup_to(into / LEDGER)
        ledger.close()
        keep_recipe(recipe, into)

    state = CheckpointState(0, 0, "first", 0, recipe_digest(recipe))
    write_checkpoint(folder / "checkpoints", 0, save_policy=save, state=state)


def test_a_changed_recipe_is_named_at_resume(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointed(tmp_path, recipe_of(tmp_path, max_staleness=1))
    with caplog.at_level(logging.WARNING):
        find_start(
            tmp_path, "auto", recipe_of(tmp_path, max_staleness=1, listen="127.0.0.1:7000")
        ).ledger.close()
        assert caplog.messages == []
        find_start(tmp_path, "auto", recipe_of(tmp_path, max_staleness=0)).ledger.close()
    [warning] = caplog.messages
    assert "trainer.max_staleness 1 -> 0" in warning


def test_a_resume_on_another_number_of_ranks_finds_the_same_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpointed(tmp_path, recipe_of(tmp_path))
    (state,) = (tmp_path / "checkpoints").glob("step_*/state.json")
    assert not {"world", "ranks", "world_size"} & json.loads(state.read_text()).keys()
    with caplog.at_level(logging.WARNING):
        start = find_start(tmp_path, "resume", recipe_of(tmp_path, parallel={"dp": 4}))
    start.ledger.close()
    assert (start.step, start.checkpoint) == (0, state.parent)
    assert "trainer.parallel.dp 1 -> 4" in caplog.text, "said, not refused"


def test_a_change_that_the_ledger_forbids_is_an_error_and_changes_nothing(tmp_path: Path) -> None:
    checkpointed(tmp_path, recipe_of(tmp_path, generations_per_prompt=4))
    before = (tmp_path / LEDGER).read_bytes()
    other = recipe_of(tmp_path, generations_per_prompt=8)
    with pytest.raises(OmnifleetError, match=r"trainer\.generations_per_prompt 4 -> 8") as refused:
        find_start(tmp_path, "auto", other)
    assert refused.value.reason is Reason.INVALID_CONFIG and "--fresh" in refused.value.knob
    assert (tmp_path / LEDGER).read_bytes() == before
    find_start(tmp_path, "fresh", other).ledger.close()


async def test_data_that_no_longer_has_a_leased_prompt_ends_the_run(tmp_path: Path) -> None:
    with world(tmp_path, data=rows(4)) as w:
        lease = w.prompts.lease(version=0, ttl_s=60)
        assert lease is not None
    with world(tmp_path, data=rows(8)[4:]) as w:
        with pytest.raises(OmnifleetError, match="the data does not"):
            await w.controller.run()


def test_a_torn_line_does_not_swallow_the_next_one(tmp_path: Path) -> None:
    line = {"step": 1, "lineage": "a", "version": 1, "unix_ms": 5, "reward": 0.5}
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps(line) + "\n" + json.dumps(line)[:20])
    Journal(tmp_path, step=1).write(StepRecord(2, WeightVersion("r", "a", 2), {"reward": 0.75}, 6))
    assert Journal(tmp_path, step=2).values("reward") == [0.5, 0.75]


def test_a_resume_is_told_in_words_and_kept_for_whoever_watches(tmp_path: Path) -> None:
    first = find_start(tmp_path, "auto")
    first.ledger.add_epoch(0, ["p0", "p1"])
    first.ledger.lease_next(2, version=0, ttl_s=60)
    first.ledger.close()
    kept = json.loads((tmp_path / "start.json").read_text())
    assert (kept["lineage"], kept["resumed"]) == (first.lineage, "")
    again = find_start(tmp_path, "auto")
    again.ledger.close()
    kept = json.loads((tmp_path / "start.json").read_text())
    assert kept["lineage"] == again.lineage and again.began_unix == first.began_unix
    assert kept["resumed"] == (
        "begun again at step 0: no checkpoint yet; 2 prompts that were out taken up again"
    )
    found = Rollback("b", 24, ready_again=4, expired=0, kept=5, reclaimed=3, cut_off=5)
    assert resumed_in_words(found, checkpoint=True) == (
        "resumed from step 24; 8 prompts that were out taken up again; 5 groups ready to train; "
        "4 groups taken back from steps after the checkpoint"
    )
