"""The circle-click example on a real engine: a tiny model that was taught one call, vLLM's own parser, one trained step."""

from __future__ import annotations

import json
import math
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from examples.environments.circle_click import CircleClick
from omnifleet.config.load import load_recipe
from tests.integration.nemo_gym_world import ROOT
from tests.integration.one_reply import SIDE, teach
from tests.integration.test_environments_real import trained
from tests.support_run import RECIPE, CliRun

CLICK = "examples.environments.circle_click:CircleClick"
GROUPS, SAMPLES = 4, 4


@pytest.mark.soak
@pytest.mark.heavy
@pytest.mark.timeout(900)
def test_a_tool_call_of_a_real_engine_is_parsed_judged_and_trained(
    cli_run: Callable[..., CliRun], random_checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT), prepend=os.pathsep)
    tasks = CircleClick(SIDE).tasks("train", GROUPS, load_recipe(str(RECIPE)).run.seed)
    x, y, _ = tasks[0].extra["circle"]
    hit = {
        task.id: float(math.dist((x, y), task.extra["circle"][:2]) <= task.extra["circle"][2])
        for task in tasks
    }
    assert set(hit.values()) == {0.0, 1.0}, "one click hits some circles and not all"
    model = shutil.copytree(random_checkpoint, tmp_path / "taught")
    teach(model, f"[click(x={x}, y={y})]")
    gym = {"environment": CLICK, "params": {"size": SIDE}}
    run = cli_run(
        f"model.path={model}",
        f"data.train={json.dumps([{**gym, 'size': GROUPS}])}",
        f"data.heldout={json.dumps([{**gym, 'split': 'val'}])}",
        "gateway.tool_parser=pythonic",
        "trainer.backend=automodel",
        f"trainer.prompts_per_step={GROUPS}",
        f"trainer.generations_per_prompt={SAMPLES}",
        "trainer.steps=1",
        "sampling.max_tokens=32",
        "evaluation.size=4",
        "environments.processes=1",
        "rollout.workers=1",
        engine="vllm",
    )
    run.train()
    assert run.finish(400) == 0
    (found,) = trained(run).values()
    assert len(found) == GROUPS * SAMPLES and all(len(one.media) == 1 for one in found)
    sentence, said = Counter(tuple(one.token_ids) for one in found).most_common(1)[0]
    assert said >= len(found) // 2, [one.text for one in found]
    taught = [one for one in found if tuple(one.token_ids) == sentence]
    for one in taught:
        assert one.components["called"] == 1.0 and all(one.mask)
        assert one.reward == hit[one.identity.prompt_id.rpartition("/")[2]]
    assert {one.reward for one in taught} == {0.0, 1.0}
    assert run.summary()["tmpe_max"] < 1.02
