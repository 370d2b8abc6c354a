"""A policy on several nodes: its other nodes are started with the trainer, and stopped after it."""

from __future__ import annotations

from pathlib import Path

from omnifleet.launch.plan import ORDER, follower_specs, prepare_run
from omnifleet.launch.port import ProcessSpec
from omnifleet.launch.supervisor import Supervisor, want
from omnifleet.service import write_record
from tests.unit.small_run import small_recipe


class Recorded:
    """A launcher, and every process that it starts."""

    pid = 1

    def __init__(self) -> None:
        self.said: list[str] = []

    def start(self, spec: ProcessSpec) -> Ended:
        self.said.append(f"start {spec.name}")
        return Ended(self, spec.name)


class Ended:
    pid = 1

    def __init__(self, launcher: Recorded, name: str) -> None:
        self._launcher, self._name = launcher, name

    def poll(self) -> int | None:
        return None

    def stop(self, grace_s: float) -> None:
        self._launcher.said.append(f"stop {self._name}")


def test_the_other_nodes_of_a_policy_come_with_the_trainer_and_go_after_it(tmp_path: Path) -> None:
    recipe = small_recipe(tmp_path, trainer={"parallel": {"dp": 4, "nodes": 2}})
    run_dir = prepare_run(recipe)
    (spec,) = follower_specs(run_dir, recipe)
    assert spec.command[-6:] == ["trainer", "follow", "--run-dir", str(run_dir), "--node", "1"]
    for name in ORDER:
        write_record(run_dir, name, grpc="127.0.0.1:1")
    launcher = Recorded()
    supervisor = Supervisor(run_dir, recipe, launcher)
    want(run_dir, train=True)
    supervisor._follow_trainer()
    supervisor._follow_trainer()
    assert launcher.said == ["start trainer", "start policy-node-1"]
    want(run_dir, train=False)
    supervisor._follow_trainer()
    assert launcher.said[2:] == ["stop trainer", "stop policy-node-1"] and not supervisor._services
