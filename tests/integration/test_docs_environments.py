"""docs/environments.md as a newcomer uses it: the gym, its rehearsal and the recipe, as they stand there."""

from __future__ import annotations

import importlib
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from omnifleet.config.recipe import DataConfig
from omnifleet.config.services import EnvironmentsConfig
from omnifleet.environments import Scored, Task, load_environment, rehearse
from omnifleet_trainer.data import load_split

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "environments.md").read_text()


def blocks(kind: str) -> list[str]:
    return re.findall(rf"^```{kind}\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)


def test_the_gym_of_the_page_is_rehearsed_and_its_recipe_loads_its_tasks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gym, rehearsal = blocks("python")[:2]
    (tmp_path / "counting.py").write_text(gym)
    (tmp_path / "try_it.py").write_text(rehearsal)
    done = subprocess.run(
        [sys.executable, "try_it.py"], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.stdout == "0.5\n", done.stderr
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe, processes = (yaml.safe_load(block) for block in blocks("yaml")[:2])
    data = DataConfig.model_validate(recipe["data"])
    train = load_split(data.train_sets[0], seed=1)
    heldout = load_split(data.heldout_sets[0], seed=1, size=4)
    assert (len(train), len(heldout)) == (512, 4)
    assert train[3].prompt_id == "counting:Counting/train/3" and train[3].images and train[3].answer
    EnvironmentsConfig.model_validate(processes["environments"])


SOLVE = """
import httpx

async def solve(text, *, base_url, api_key):
    body = {"model": "policy", "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient(trust_env=False) as client:
        reply = await client.post(f"{base_url}/chat/completions", json=body)
    return float(reply.json()["choices"][0]["message"]["content"])
"""


def test_the_agent_of_the_page_gets_an_address_and_the_others_recipe_is_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "agent_framework.py").write_text(SOLVE)
    (tmp_path / "solver.py").write_text(blocks("python")[2])
    monkeypatch.syspath_prepend(str(tmp_path))
    solver = importlib.import_module("solver").Solver()
    outcome, messages = rehearse(solver, Task("t", "How much?"), ["0.25"])
    assert outcome == Scored(0.25) and messages[0]["content"] == "How much?"
    sets = DataConfig.model_validate(yaml.safe_load(blocks("yaml")[2])["data"]).train_sets
    for split in sets:
        load_environment(split.environment, split.params)


def test_the_page_names_every_outcome() -> None:
    from omnifleet.environments import outcome

    table = PAGE.partition("## How an episode ends")[2].partition("None but the first two")[0]
    named = re.findall(r"^\| `(\w+)\(", table, flags=re.MULTILINE)
    assert sorted(named) == sorted(kind.__name__ for kind in outcome.Outcome.__args__)
