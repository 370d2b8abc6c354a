"""The trainer as a process with real media, reward and gateway services and two workers with FAKE engines."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.auth import Scope
from omnifleet.client.trainer import TrainerClient
from omnifleet.config.load import dump_recipe, recipe_from_mapping
from omnifleet.service import load_tokens, peer
from omnifleet_trainer.ledger import LedgerReader
from tests.integration.trainer_child import write_model

CHILD = Path(__file__).with_name("trainer_child.py")
APPS = {
    "media": "omnifleet_media.cli import app",
    "reward": "omnifleet_reward.cli import app",
    "gateway": "omnifleet_rollout.cli import gateway_app as app",
    "rollout": "omnifleet_rollout.cli import app",
}
pytestmark = pytest.mark.timeout(480)


@asynccontextmanager
async def process(run_dir: Path, name: str, *command: str) -> AsyncIterator[asyncio.subprocess.Process]:
    """A child whose output goes to a file of its name; asked to end, then killed, if it still runs."""
    with (run_dir / f"{name}.log").open("ab") as log:
        child = await asyncio.create_subprocess_exec(sys.executable, *command, stdout=log, stderr=log)
    try:
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
        try:
            await asyncio.wait_for(child.wait(), 10)
        except TimeoutError:
            child.kill()
            await child.wait()


def service(run_dir: Path, name: str, *options: str) -> Any:
    app = "rollout" if name.startswith("worker") else name
    code = f"from {APPS[app]}; app()"
    return process(run_dir, name, "-c", code, "serve", "--run-dir", str(run_dir), *options)


def trainer(run_dir: Path, *options: str) -> Any:
    return process(run_dir, "trainer", str(CHILD), "serve", "--run-dir", str(run_dir), *options)


def write_recipe(folder: Path, *, rollout: dict[str, Any] | None = None, **trainer_settings: Any) -> Path:
    run_dir = folder / "run"
    run_dir.mkdir()
    write_model(folder / "model")
    body = {
        "run": {"name": "run", "root": str(folder)},
        "model": {"path": str(folder / "model")},
        "reward": [{"name": "format"}],
        "sampling": {"max_tokens": 12, "top_k": 3},
        "rollout": {"engine": {"return_routed_experts": True, "return_sampling_mask": True}, **(rollout or {})},
        "data": {"max_prompt_tokens": 200},
        "evaluation": {"size": 4, "controls": True},
        "trainer": {
            "backend": "fake", "steps": 12, "prompts_per_step": 3, "generations_per_prompt": 2, "checkpoint_every": 2,
            "max_staleness": 1, "rollout_timeout_s": 30, "step_timeout_s": 60, **trainer_settings,
        },
        "media": {"store": str(folder / "store")},
    }  # fmt: skip
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe_from_mapping(body, "test")))
    return run_dir


@asynccontextmanager
async def services(run_dir: Path) -> AsyncIterator[None]:
    """Everything but the trainer."""
    load_tokens(run_dir)
    async with AsyncExitStack() as stack:
        for name in ("media", "reward", "gateway"):
            await stack.enter_async_context(service(run_dir, name))
        for name, token_s in (
            ("worker-0", "0.002"),
            ("worker-1", "0.03"),
        ):  # so that replies end at different times
            options = ("--name", name, "--engine", "fake", "--fake-token-s", token_s)
            await stack.enter_async_context(service(run_dir, name, *options))
        for name in ("media", "reward", "gateway", "worker-0", "worker-1"):
            await peer(run_dir, name, deadline_s=60)
        yield


async def steps_of(run_dir: Path, until: int) -> None:
    """Return once the run has trained step `until`."""
    address = await peer(run_dir, "trainer", deadline_s=150)
    async with TrainerClient.open(address, load_tokens(run_dir).secret(Scope.OPERATOR)) as client:
        async with asyncio.timeout(120):
            async for report in client.steps():
                if report.step >= until:
                    return


def said(run_dir: Path) -> str:
    return "\n".join(f"--- {p.name}\n{p.read_text()[-3000:]}" for p in sorted(run_dir.glob("*.log")))


async def test_a_run_survives_kill_9_and_sigterm_of_the_trainer(tmp_path: Path) -> None:
    run_dir = write_recipe(tmp_path)
    async with services(run_dir):
        async with trainer(run_dir) as child:
            await steps_of(run_dir, 3)
            child.kill()
            await child.wait()
        (run_dir / "services" / "trainer.json").unlink()
        async with trainer(run_dir, "--resume") as child:
            await steps_of(run_dir, 6)
            child.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(child.wait(), 15) == 143, said(run_dir)
        (run_dir / "services" / "trainer.json").unlink()
        async with trainer(run_dir) as child:
            assert await asyncio.wait_for(child.wait(), 120) == 0, said(run_dir)
    async with trainer(run_dir) as child:  # done: it asks for no service
        assert await asyncio.wait_for(child.wait(), 60) == 0, said(run_dir)
    counts = LedgerReader(run_dir / "ledger.sqlite").counts()
    assert (counts.consumed, counts.consumed_twice, counts.lost, counts.in_flight) == (12 * 6, 0, 0, 0)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["steps"] == 12 and summary["ledger"]["consumed_twice"] == 0
    assert summary["controls"].keys() == {"blank", "shuffled"}
    assert summary["refits_with_requests_in_flight"] > 0
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert max(row["lag_max"] for row in rows if "lag_max" in row) <= 1
    assert "heldout_reward" in rows[-1]
    replayed = {(row["replayed/experts"], row["replayed/sampling_masks"]) for row in rows if "lag_max" in row}
    assert replayed == {(1.0, 1.0)}, (
        "what engines return comes through services and ledger to each trained sample"
    )


async def test_a_missing_model_is_said_before_anything_is_waited_for(tmp_path: Path) -> None:
    run_dir = write_recipe(tmp_path)
    async with trainer(run_dir, "--set", "model.path=/nowhere") as child:
        assert await asyncio.wait_for(child.wait(), 60) == 2
    assert "(knob: model.path)" in (run_dir / "trainer.log").read_text().splitlines()[-1]
    assert not (run_dir / "ledger.sqlite").exists()
