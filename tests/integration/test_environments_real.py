"""Environments on a real engine with a real policy: a puzzle of two turns and pictures, and NeMo Gym's own agents and tool.

One run of two steps for all: vLLM on the CPU, AutoModel, and NeMo Gym's servers as processes beside it.
"""

from __future__ import annotations

import base64
import io
import json
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import pytest
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.report.records import read_run
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Trajectory
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from tests.integration.nemo_gym_world import ROOT, NemoGymWorld, free_port
from tests.support_run import CliRun, until

PUZZLE = "examples.environments.zoom_puzzle:ZoomPuzzle"
LIVE = "omnifleet.environments.adapters.nemo_gym:NemoGym"
COLLECTED = "omnifleet.environments.adapters.nemo_gym:Collected"
SAMPLES = 4


def mcqa(question: str) -> dict[str, object]:
    """A row of the mcqa server. The pattern finds A in every reply that has the letter: chance rewards a random model."""
    return {
        "responses_create_params": {"input": [{"role": "user", "content": question}]},
        "options": [{"A": "yes"}, {"B": "no"}],
        "expected_answer": "A",
        "template_metadata": {"output_regex": "([ae])"},
    }


def maths(sum_: str, answer: str, *, picture: bool = False) -> dict[str, object]:
    """A row of the math_with_judge server, which judges by math-verify alone. picture: beside its text."""
    content: object = f"{sum_}="
    if picture:
        out = io.BytesIO()
        Image.new("RGB", (56, 56), "red").save(out, "PNG")
        url = "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()
        image = {"type": "input_image", "detail": "auto", "image_url": url}
        content = [{"type": "input_text", "text": content}, image]
    asked = {"input": [{"role": "user", "content": content}], "max_output_tokens": 8}
    return {"responses_create_params": asked, "question": sum_, "expected_answer": answer}


def write_rows(path: Path, rows: list[dict[str, object]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def trained(run: CliRun) -> dict[str, list[Trajectory]]:
    """What the run trained on, by environment."""
    path = run.run_dir / "ledger.sqlite"
    groups = dict.fromkeys(row.group for row in LedgerReader(path).rows(state="consumed"))
    ledger = SqliteLedger(path, owner="test")
    found = defaultdict(list)
    try:
        for group in groups:
            for trajectory in ledger.load_group(group).trajectories:
                found[trajectory.identity.environment].append(trajectory)
    finally:
        ledger.close()
    return found


@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_puzzle_and_nemo_gym_are_trained_on_by_real_engines(
    cli_run: Callable[..., CliRun], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    gym = NemoGymWorld(tmp_path, free_port())
    sums = write_rows(tmp_path / "sums.jsonl", [maths("1+1", "2"), maths("2+2", "4", picture=True)])
    questions = write_rows(tmp_path / "questions.jsonl", [mcqa("is it?"), mcqa("was it?")])
    rollouts = tmp_path / "rollouts.jsonl"
    sets = [
        {"environment": PUZZLE, "size": 2},
        {"environment": LIVE, "params": {"rows": str(sums), "head": gym.head, "agent": "math_with_judge_simple_agent"}},
        {"environment": COLLECTED, "params": {"rows": str(questions), "rollouts": str(rollouts)}},
    ]  # fmt: skip
    run = cli_run(
        f"data.train={json.dumps(sets)}",
        f"data.heldout={json.dumps([{'environment': PUZZLE, 'split': 'val'}])}",
        "evaluation.other_tasks=true",
        "trainer.backend=automodel",
        "trainer.prompts_per_step=3",
        f"trainer.generations_per_prompt={SAMPLES}",
        "trainer.steps=2",
        "trainer.sampler=in_order",  # each row once: groups that wait for the tool are not left behind
        "trainer.optimizer.lr=1e-4",
        "evaluation.size=4",
        "environments.processes=1",
        "environments.timeout_s=480",
        "rollout.workers=1",
        "rollout.engine.media_tokens=ban",
        "rollout.engine.images_per_prompt=2",
        engine="vllm",
    )
    run.train()
    gateway = until(lambda: read_gateway(run), 240, lambda: f"a gateway\n{run.logs()}")
    secret = load_tokens(run.run_dir).secret(Scope.ENV)
    with gym.started(f"http://{gateway}/v1", secret, "policy"):
        run.wait_step(0, 300)  # the engine has the run's weights: what it says from now on may be trained on
        gym.collect(questions, rollouts, "mcqa_simple_agent", SAMPLES)
        assert run.finish(400) == 0

    ledger, found = run.summary()["ledger"], trained(run)
    assert (ledger["consumed"], ledger["consumed_twice"], ledger["lost"]) == (2 * 3 * SAMPLES, 0, 0)
    assert {name: len(group) for name, group in found.items()} == dict.fromkeys(
        (PUZZLE, LIVE, COLLECTED), 2 * SAMPLES
    )
    for trajectory in found[PUZZLE]:
        assert 0 in trajectory.mask and len(trajectory.media) == 2
    assert sorted(len(trajectory.media) for trajectory in found[LIVE]) == [0] * SAMPLES + [1] * SAMPLES
    for trajectory in (*found[LIVE], *found[COLLECTED]):
        assert all(trajectory.mask) and trajectory.reward in (0.0, 1.0)
        assert len(trajectory.token_ids) <= (8 if trajectory.identity.environment == LIVE else 16)
    collected = [json.loads(line) for line in rollouts.read_text().splitlines()]
    assert sorted(row["reward"] for row in collected) == sorted(t.reward for t in found[COLLECTED])
    steps = read_run(run.run_dir).steps
    assert run.summary()["tmpe_max"] < 1.02, "the policy computes what the engine sampled, over all turns"
    assert [row["step"] for row in steps] == [0, 1, 2] and max(row["lag_max"] for row in steps[1:]) <= 1


def read_gateway(run: CliRun) -> str:
    """The gateway's HTTP address, "" while it is not up."""
    assert run.process is not None
    if run.process.poll() is not None:
        run.finish(1)
    try:
        record = read_records(run.run_dir).get("gateway")
    except (StopIteration, FileNotFoundError):
        return ""
    return record.http if record else ""
