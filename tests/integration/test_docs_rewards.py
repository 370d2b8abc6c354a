"""docs/rewards.md as a reader uses it: its module and recipes work, its commands say what the page says."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.telemetry.counters import Counters
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.cli import app
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "rewards.md").read_text()


def blocks(kind: str) -> list[str]:
    """Fenced blocks of one language."""
    fences = re.findall(r"^```(\w*)\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
    return [body for language, body in fences if language == kind]


def scorers(recipe: dict[str, Any]) -> list[ScorerConfig]:
    return [ScorerConfig.model_validate(scorer) for scorer in recipe["reward"]]


def test_the_table_names_every_scorer() -> None:
    table = PAGE.partition("## The scorers")[2].partition("\n`format`")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, flags=re.MULTILINE)
    assert named == [scorer.name for scorer in Registry().known()]


async def test_the_module_and_the_recipes_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (module,) = blocks("python")
    (tmp_path / "mine.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    boxes, own, judged = (yaml.safe_load(block) for block in blocks("yaml"))
    config = RewardConfig.model_validate(own["reward_service"])
    async with reward_service(config, Counters("reward")) as service:
        box = Reply("<think>x</think><answer>[0,0,10,10]</answer>", "[0,0,10,10]")
        (scored,), _ = await service.score(scorers(boxes), [box])
        assert scored.total.score == pytest.approx(1)
        (scored,), version = await service.score(scorers(own), [Reply("a b " * 125, "c " * 250)])
        assert scored.total.score == pytest.approx(0.2 * 0.5 + 0.8)
        assert "mine:WORDS@2" in version and "mine:brief@src-" in version
    endpoints = RewardConfig.model_validate(judged["reward_service"]).endpoints
    assert endpoints["grader"].budget_calls == 20000
    assert Registry().reward(scorers(judged)).version.startswith("judge@1#")


def test_the_commands_of_the_page_score_by_hand() -> None:
    lines = [
        line
        for block in blocks("")
        for line in block.splitlines()
        if line.startswith("omnifleet reward score")
    ]
    assert len(lines) == 2
    for line in lines:
        done = CliRunner().invoke(app, shlex.split(line)[2:])
        assert done.exit_code == 0, done.output
        assert '"score": 1.0' in done.output
