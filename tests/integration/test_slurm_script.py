"""The Slurm script against fakes of srun, scontrol, ray and omnifleet that record how they were called."""

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "deploy/slurm/omnifleet.sbatch"
SUBMIT = ROOT / "deploy/slurm/run.sh"

# Each fake writes one line a call. srun drops its own options and runs the rest, as one task would.
RECORD = '#!/usr/bin/env bash\necho "$(basename "$0") $*" >>"$CALLS"\n'
FAKES = {
    "srun": 'while [[ ${1:-} == --* ]]; do shift; done\n[ "$1" = hostname ] && { echo "10.0.0.1 fe80::1"; exit; }\n'
    'exec "$@"\n',
    "scontrol": '[ "$1 $2" = "show hostnames" ] || exit 1\nfor n in $NODES; do echo "$n"; done\n',
    "sbatch": "echo Submitted batch job 7\n",
    "ray": 'case $1 in health-check) [ -e "$CALLS.head" ]; exit;; esac\n[ -z "${RAY_DIES:-}" ] || exit 1\n'
    'trap \'echo "ray stopped" >>"$CALLS"; exit 0\' TERM\ntouch "$CALLS.up.$$"\n'
    'case $* in *--head*) touch "$CALLS.head";; esac\nwhile :; do sleep 0.05; done\n',
    "omnifleet": '[ "$1" != config ] || { [ "$3" != broken ]; exit; }\n'
    'set -- $NODES\nuntil [ "$(ls "$CALLS".up.* | wc -l)" = $# ]; do sleep 0.02; done\n'
    'echo "env $RAY_ADDRESS $OMNIFLEET_RAY_NODES" >>"$CALLS"\n[ -z "${TRAIN_WAITS:-}" ] || {\n'
    'trap \'echo "checkpoint written" >>"$CALLS"; exit 130\' INT\ntouch "$CALLS.training"\n'
    "while :; do sleep 0.05; done; }\nexit ${TRAIN_EXIT:-0}\n",
}


@dataclass
class Cluster:
    """A PATH of fakes."""

    folder: Path
    env: dict[str, str] = field(default_factory=dict)

    def start(self, script: Path, *arguments: str, shell: str = "", **env: str) -> subprocess.Popen[str]:
        full = {
            "PATH": f"{self.folder}:/usr/bin:/bin",
            "CALLS": str(self.folder / "calls"),
            "NODES": "gpu-a gpu-b gpu-c",
            "HOME": str(self.folder),
            "OMNIFLEET_VENV": str(self.folder / "no-venv"),
            **self.env,
            **env,
        }
        pipe = subprocess.PIPE
        command = ["bash", "-c", f'{shell}exec bash "$@"', "bash", str(script), *arguments]
        return subprocess.Popen(command, env=full, cwd=self.folder, stdout=pipe, stderr=pipe, text=True)

    def run(self, script: Path, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        process = self.start(script, *arguments, **env)
        out, err = process.communicate(timeout=30)
        return subprocess.CompletedProcess([], process.returncode, out, err)

    def calls(self, tool: str = "") -> list[str]:
        path = self.folder / "calls"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(tool)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    for name, body in FAKES.items():
        (tmp_path / name).write_text(RECORD + body)
        (tmp_path / name).chmod(0o755)
    yield Cluster(
        tmp_path,
        {
            "SLURM_JOB_ID": "4711",
            "SLURM_JOB_NODELIST": "gpu-[a-c]",
            "SLURM_CPUS_ON_NODE": "64",
            "SLURM_GPUS_ON_NODE": "8",
        },
    )


def wait_until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < end, "did not happen in time"
        time.sleep(0.02)


def test_scripts_are_bash() -> None:
    for script in (SCRIPT, SUBMIT):
        subprocess.run(["bash", "-n", str(script)], check=True)
        assert os.access(script, os.X_OK)


def test_ray_spans_the_allocation_and_the_recipe_runs_on_it(cluster: Cluster) -> None:
    done = cluster.run(SCRIPT, "omni", "trainer.steps=5", "run.name=a b")
    assert done.returncode == 0, done.stderr
    heads = [call for call in cluster.calls("srun") if "--head" in call]
    assert len(heads) == 1 and "--nodelist=gpu-a" in heads[0]
    assert "--node-ip-address=10.0.0.1 --port=24711" in heads[0] and "--num-cpus=64 --num-gpus=8" in heads[0]
    joins = [call for call in cluster.calls("srun") if "ray start --address=10.0.0.1:24711" in call]
    assert sorted(node for node in ("gpu-b", "gpu-c") for join in joins if node in join) == ["gpu-b", "gpu-c"]
    assert len(joins) == 2  # side by side, in no order
    assert "omnifleet config check omni trainer.steps=5 run.name=a b" in cluster.calls()
    assert "omnifleet train omni trainer.steps=5 run.name=a b --launcher ray" in cluster.calls()
    assert cluster.calls("env") == ["env 10.0.0.1:24711 3"]
    assert cluster.calls().index(heads[0]) < cluster.calls().index(joins[0])


def test_ray_is_stopped_however_training_ends(cluster: Cluster) -> None:
    done = cluster.run(SCRIPT, "omni", TRAIN_EXIT="3")
    assert done.returncode == 3
    assert len(cluster.calls("ray stopped")) == 3


@pytest.mark.parametrize("shell", ["", "trap '' INT; "], ids=["plain", "SIGINT ignored, as by nohup"])
def test_sigterm_lets_the_trainer_write_a_checkpoint_first(cluster: Cluster, shell: str) -> None:
    process = cluster.start(SCRIPT, "omni", shell=shell, TRAIN_WAITS="1")
    wait_until(lambda: (cluster.folder / "calls.training").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 143
    assert len(cluster.calls("ray stopped")) == 3
    calls = cluster.calls()
    assert calls.index("checkpoint written") < calls.index("ray stopped")


def test_a_trainer_that_does_not_stop_is_killed(cluster: Cluster) -> None:
    stubborn = FAKES["omnifleet"].replace("exit 130", "sleep 600")
    (cluster.folder / "omnifleet").write_text(RECORD + stubborn)
    process = cluster.start(SCRIPT, "omni", TRAIN_WAITS="1", OMNIFLEET_STOP_S="1")
    wait_until(lambda: (cluster.folder / "calls.training").exists())
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=90)
    assert process.returncode == 143


def test_one_node_needs_no_joins(cluster: Cluster) -> None:
    assert cluster.run(SCRIPT, "omni", NODES="gpu-a").returncode == 0
    assert not [call for call in cluster.calls("ray start") if "--address" in call]
    assert cluster.calls("env") == ["env 10.0.0.1:24711 1"]


@pytest.mark.parametrize(
    ("arguments", "env", "says"),
    [
        ([], {}, "no recipe"),
        (["omni", "steps"], {}, "section.field=value"),
        (["omni", "--steps=5"], {}, "section.field=value"),
        (["omni"], {"SLURM_JOB_ID": ""}, "sbatch"),
        (["broken"], {}, "nothing was started"),
        (["omni"], {"NODES": ""}, "no nodes"),
        (["omni"], {"RAY_DIES": "1"}, "ended"),
    ],
)
def test_what_is_wrong_is_said_before_training(
    cluster: Cluster, arguments: list[str], env: dict[str, str], says: str
) -> None:
    done = cluster.run(SCRIPT, *arguments, **env)
    assert done.returncode == 2 and says in done.stderr
    assert not cluster.calls("omnifleet train")


def test_a_missing_tool_is_named(cluster: Cluster) -> None:
    (cluster.folder / "ray").unlink()
    done = cluster.run(SCRIPT, "omni")
    assert done.returncode == 2 and "ray not found" in done.stderr


def test_submission(cluster: Cluster) -> None:
    done = cluster.run(SUBMIT, "-N", "2", "-G", "8", "-t", "4:00:00", "omni", "trainer.steps=5")
    assert done.returncode == 0, done.stderr
    options = "--nodes=2 --time=4:00:00 --gpus-per-node=8"
    assert cluster.calls("sbatch") == [f"sbatch {options} {SCRIPT} omni trainer.steps=5"]
    assert "sbatch" in cluster.run(SUBMIT, "-n", "omni").stdout and len(cluster.calls("sbatch")) == 1
    for wrong in (["-N", "0", "omni"], ["-G", "x", "omni"], ["-Z", "omni"], [], ["broken"]):
        assert cluster.run(SUBMIT, *wrong).returncode != 0
    assert len(cluster.calls("sbatch")) == 1
