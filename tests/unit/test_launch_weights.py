"""What a run serves without a trainer: the newest weights that engines can load, and no target that nobody can reach."""

from __future__ import annotations

from pathlib import Path

from omnifleet.client.fleet import WorkerView
from omnifleet.config.load import recipe_from_mapping
from omnifleet.launch.plan import newest_weights, worker_spec
from omnifleet.types import WeightVersion, WorkerState
from omnifleet_rollout.fleet.registry import Registry


def _checkpoint(run_dir: Path, name: str, *, loadable: bool = True) -> Path:
    policy = run_dir / "checkpoints" / name / "policy"
    policy.mkdir(parents=True)
    if loadable:
        (policy / "config.json").write_text("{}")
    return policy


def test_the_newest_loadable_checkpoint_is_served(tmp_path: Path) -> None:
    assert newest_weights(tmp_path) is None
    _checkpoint(tmp_path, "step_00000002")
    tenth = _checkpoint(tmp_path, "step_00000010")
    assert newest_weights(tmp_path) == tenth
    again = _checkpoint(tmp_path, "step_00000010.1")
    _checkpoint(tmp_path, "step_00000011", loadable=False)
    _checkpoint(tmp_path, ".writing-12-ab-1")
    assert newest_weights(tmp_path) == again
    recipe = recipe_from_mapping(
        {"run": {"name": "r"}, "model": {"path": "base"}, "reward": [{"name": "format"}]}, "test"
    )
    spec = worker_spec(tmp_path, recipe, "worker-0", model=again)
    assert spec.command[spec.command.index("--model") + 1] == str(again)


def test_a_new_life_needs_no_weights_that_nobody_brings() -> None:
    registry = Registry(lambda: 0.0, heartbeat_s=1, suspect_after_s=4, dead_after_s=12, hung_after_s=120)
    base = WeightVersion("", "base", 0)
    joining = WorkerView(
        id="w-1", instance="i", pool="default", grpc_address="h:1", state=WorkerState.JOINING
    )
    lease = registry.join(joining)
    registry.announce("default", WeightVersion("run", "gone", 12), max_lag=1)
    serving = WorkerView(
        id="w-1",
        instance="i",
        pool="default",
        grpc_address="h:1",
        state=WorkerState.CATCHING_UP,
        version=base,
    )
    registry.heartbeat(lease.lease_id, serving)
    assert registry.workers()[0].state is WorkerState.CATCHING_UP
    registry.forget_targets()
    registry.heartbeat(lease.lease_id, serving)
    assert registry.workers()[0].state is WorkerState.READY
