"""Which GPUs the local launcher shows to whom."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from omnifleet.config import load_recipe
from omnifleet.config.cluster import ClusterConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.gpus import VISIBLE, HostGpus
from omnifleet.launch.local import LocalLauncher
from omnifleet.launch.placement import place
from omnifleet.launch.plan import service_spec, trainer_gpus, worker_spec
from omnifleet.launch.port import ProcessSpec

RUN = Path("run")


@dataclass
class Living:
    """A process that lives until told otherwise."""

    pid: int = 1
    code: int | None = None

    def poll(self) -> int | None:
        return self.code

    def stop(self, grace_s: float) -> None:
        self.code = 0


def engine(number: int, size: int = 1) -> ProcessSpec:
    return ProcessSpec(f"worker-{number}", ["true"], {}, RUN / "log", {"GPU": float(size)})


def test_trainer_and_engines_see_their_own() -> None:
    gpus = HostGpus(ClusterConfig(gpus_per_node=4, generation_gpus=2), ["4", "5", "6", "7"])
    assert gpus.environment(gpus.choose(service_spec(RUN, "trainer"))) == {VISIBLE: "4,5"}
    assert gpus.environment(gpus.choose(service_spec(RUN, "media"))) == {VISIBLE: ""}
    assert gpus.environment(gpus.choose(engine(0, 2))) == {VISIBLE: "6,7"}


def test_a_gpu_is_free_again_once_its_engine_has_ended() -> None:
    gpus = HostGpus(ClusterConfig(gpus_per_node=3, generation_gpus=2))
    living = [Living(), Living()]
    for number, handle in enumerate(living):
        chosen = gpus.choose(engine(number))
        gpus.hold(engine(number), chosen, handle)
        assert chosen == (number + 1,)
    with pytest.raises(OmnifleetError, match="no 1 free GPU") as caught:
        gpus.choose(engine(2))
    assert caught.value.retryable and caught.value.reason is Reason.UNAVAILABLE
    living[0].code = -9
    assert gpus.choose(engine(2)) == (1,)


def test_those_who_take_turns_share_all() -> None:
    gpus = HostGpus(ClusterConfig(gpus_per_node=2))
    assert gpus.choose(service_spec(RUN, "trainer")) == (0, 1)
    assert gpus.choose(engine(0, 2)) == (0, 1)


def test_fewer_visible_than_the_cluster_says_is_an_error() -> None:
    with pytest.raises(OmnifleetError, match=r"names 1 GPUs and cluster\.gpus_per_node is 2"):
        HostGpus(ClusterConfig(gpus_per_node=2), ["0"])


def test_nothing_is_dealt_out_without_a_cluster_or_over_several_nodes() -> None:
    assert HostGpus.of(None) is None
    assert HostGpus.of(ClusterConfig(nodes=2)) is None


def test_a_started_process_sees_what_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VISIBLE, "a,b")
    launcher = LocalLauncher(HostGpus.of(ClusterConfig(gpus_per_node=2, generation_gpus=1)))
    command = [sys.executable, "-c", f"import os; print(os.environ[{VISIBLE!r}])"]
    spec = ProcessSpec("worker-0", command, {}, tmp_path / "log", {"GPU": 1.0})
    handle = launcher.start(spec)
    assert handle._process.wait(20) == 0
    assert spec.log.read_text().strip() == "b"


def test_two_gpus_of_one_node_are_divided_by_the_recipe() -> None:
    recipe = load_recipe("h200-two", plan=True)
    laid = place(recipe)
    assert [one.gpus for one in laid.policy] == [(0,)] and [one.gpus for one in laid.engines] == [(1,)]
    assert trainer_gpus(recipe) == 1 and worker_spec(RUN, recipe, "worker-0").resources["GPU"] == 1
    assert trainer_gpus(load_recipe("cpu-tiny")) == 0


@pytest.mark.parametrize(
    ("cluster", "words"),
    [
        ("{nodes: 2, gpus_per_node: 2, generation_gpus: 1}", "set cluster.generation_nodes instead"),
        (
            "{nodes: 1, gpus_per_node: 2, generation_gpus: 2}",
            "leaves none of cluster.gpus_per_node 2 to train",
        ),
    ],
)
def test_a_split_that_cannot_be_is_an_error(cluster: str, words: str) -> None:
    with pytest.raises(OmnifleetError, match=words):
        load_recipe("h200-two", (f"cluster={cluster}",))
