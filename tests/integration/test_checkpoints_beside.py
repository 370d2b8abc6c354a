"""Checkpoints written beside the next step: what they hold, what a failure does, what a time limit does."""

from __future__ import annotations

import json
import threading
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest

from omnifleet.config.load import recipe_from_mapping
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.checkpoint import latest_checkpoint
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.policy.fake import FakePolicy
from omnifleet_trainer.server.checkpoints import Checkpoints
from tests.unit.ledger_samples import group_of


class SlowPolicy(FakePolicy):
    """Writes its files only once it is let; fails as it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.let = threading.Event()
        self.failure: OSError | None = None

    def snapshot(self) -> Callable[[Path], None]:
        write = super().snapshot()

        def late(folder: Path) -> None:
            assert self.let.wait(20)
            if self.failure is not None:
                raise self.failure
            write(folder)

        return late


def _recipe(**trainer: object) -> Recipe:
    body = {
        "run": {"name": "r"},
        "model": {"path": "tiny"},
        "reward": [{"name": "format"}],
        "trainer": trainer,
    }
    return recipe_from_mapping(body, "test")


@pytest.fixture
async def parts(tmp_path: Path) -> AsyncIterator[tuple[SlowPolicy, SqliteLedger, Weights]]:
    policy, ledger = SlowPolicy(), SqliteLedger(tmp_path / "ledger.sqlite", owner="me")
    ledger.roll_back_to(0, "a")
    ledger.add_epoch(0, [f"p{n}" for n in range(20)])
    weights = Weights(policy, run="r", lineage="a", step=0)
    yield policy, ledger, weights
    policy.let.set()
    weights.close()
    ledger.close()


def _train(policy: SlowPolicy, ledger: SqliteLedger, weights: Weights) -> None:
    (lease,) = ledger.lease_next(1, version=weights.step, ttl_s=60)
    ledger.record_group(lease, group_of(lease))
    ledger.consume([lease.attempt], step=weights.step + 1, version=weights.step)
    policy.weights.append(float(weights.step + 1))
    weights.trained()


async def test_training_goes_on_and_the_checkpoint_is_of_its_step(
    parts: tuple[SlowPolicy, SqliteLedger, Weights], tmp_path: Path
) -> None:
    policy, ledger, weights = parts
    checkpoints = Checkpoints(_recipe(), tmp_path / "checkpoints", ledger, weights, lambda name: 0.5)
    _train(policy, ledger, weights)
    await checkpoints.begin(1)
    _train(policy, ledger, weights)  # beside the writing
    assert latest_checkpoint(tmp_path / "checkpoints") is None
    policy.let.set()
    path = await checkpoints.done()
    assert json.loads((path / "policy" / "fake-policy.json").read_text())["weights"] == [1.0]
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and (found[1].step, found[1].ledger_position, found[1].extra) == (
        1,
        2,
        {"metric": 0.5},
    )
    assert LedgerReader(path / "ledger.sqlite").consumed_up_to(1) == 2


async def test_a_failed_write_is_told_at_the_next_checkpoint_and_leaves_the_one_before(
    parts: tuple[SlowPolicy, SqliteLedger, Weights], tmp_path: Path
) -> None:
    policy, ledger, weights = parts
    policy.let.set()
    checkpoints = Checkpoints(_recipe(), tmp_path / "checkpoints", ledger, weights, lambda name: None)
    await checkpoints.write(0)
    policy.failure = OSError(28, "No space left on device")
    await checkpoints.begin(1)
    with pytest.raises(OmnifleetError) as failure:
        await checkpoints.begin(2)
    assert failure.value.reason is Reason.DISK_FULL
    await checkpoints.close()
    found = latest_checkpoint(tmp_path / "checkpoints")
    assert found is not None and found[1].step == 0


async def test_close_waits_for_what_is_on_its_way(
    parts: tuple[SlowPolicy, SqliteLedger, Weights], tmp_path: Path
) -> None:
    policy, ledger, weights = parts
    checkpoints = Checkpoints(_recipe(), tmp_path / "checkpoints", ledger, weights, lambda name: None)
    await checkpoints.begin(0)
    policy.let.set()
    await checkpoints.close()
    assert latest_checkpoint(tmp_path / "checkpoints") is not None


async def test_payloads_go_once_no_kept_checkpoint_needs_them(
    parts: tuple[SlowPolicy, SqliteLedger, Weights], tmp_path: Path
) -> None:
    policy, ledger, weights = parts
    policy.let.set()
    recipe = _recipe(checkpoints_kept=1, ledger_payload_steps=1)
    checkpoints = Checkpoints(recipe, tmp_path / "checkpoints", ledger, weights, lambda name: None)
    for step in (1, 2, 3):
        _train(policy, ledger, weights)
        await checkpoints.write(step)
    whole = [bool(row.own) for row in LedgerReader(tmp_path / "ledger.sqlite").rows()]
    assert whole == [False, False, False, False, True, True]  # two samples a step; step 3 is the last one
