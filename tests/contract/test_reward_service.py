"""The reward service as a real process, through its client, its HTTP routes and its command."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from omnifleet.auth import Scope, Tokens
from omnifleet.client.reward import ItemScore, RewardClient, ScoreItem
from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import peer, process_lives, read_records
from omnifleet.types import Identity, Mark
from omnifleet_reward.cli import app

CLEVR = (ScorerConfig(name="format", weight=0.2), ScorerConfig(name="exact_alnum", weight=0.8))
GOOD = "<think>one, two</think><answer>2</answer>"
MODULE = """
import time

def slow(reply):
    time.sleep(600)

def raises(reply):
    raise RuntimeError("judge is broken")
"""
COMMAND = [
    sys.executable,
    "-c",
    "from omnifleet_reward.cli import app; app()",
    "serve",
    "--log-json",
    "--run-dir",
]


@dataclass(frozen=True)
class Running:
    """A started service."""

    grpc: str
    http: str
    secret: str
    process: subprocess.Popen[bytes]


@contextmanager
def started(run_dir: Path, **settings: object) -> Iterator[Running]:
    """A service process, killed at the end if it still runs."""
    (run_dir / "judges.py").write_text(MODULE)
    (run_dir / "recipe.yaml").write_text(
        json.dumps({"reward_service": {"modules": ["judges"], "processes": 2, **settings}})
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([*sys.path, str(run_dir)])}
    process = subprocess.Popen([*COMMAND, str(run_dir)], env=environment)
    try:
        asyncio.run(peer(run_dir, "reward"))
        record = read_records(run_dir)["reward"]
        secret = Tokens.load(run_dir / "tokens.json").secret(Scope.TRAINER)
        yield Running(record.grpc, record.http, secret, process)
    finally:
        process.kill()
        process.wait()


def children(process: subprocess.Popen[bytes]) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    """One service process for all tests of this file; at the end it stops as it should."""
    with started(tmp_path_factory.mktemp("run")) as running:
        yield running
        scorers = children(running.process)
        running.process.send_signal(signal.SIGTERM)
        assert running.process.wait(10) == 0
        assert scorers and not any(process_lives(pid) for pid in scorers)


def open_client(service: Running) -> RewardClient:
    return RewardClient.open(service.grpc, service.secret, name="test")


async def test_scores_components_and_version(service: Running) -> None:
    items = [
        ScoreItem("a", GOOD, "2", Identity(run="r", attempt="1"), prompt_suffix="<think>"),
        ScoreItem("b", "two</think><answer>3</answer>", "2"),
        ScoreItem("a", "2", "2"),  # an id is echoed, not a key
    ]
    async with open_client(service) as client:
        scores = await client.score(items, CLEVR, 30)
    version = scores[0].reward_version
    assert version.startswith("exact_alnum@1+format@1#")

    def expected(id: str, score: float, form: float, right: bool, mark: Mark = Mark.SCORED) -> ItemScore:
        parts = {"format@1": form, "exact_alnum@1": float(right)}
        marks = {"format@1": Mark.SCORED, "exact_alnum@1": mark}
        return ItemScore(id, pytest.approx(score), right, parts, None, version, mark, marks)

    assert scores == [
        expected("a", 1.0, 1.0, True),
        expected("b", 0.15, 0.75, False),
        expected("a", 0.0, 0.0, False, Mark.UNPARSEABLE),
    ]


async def test_ten_thousand_items_with_progress(service: Running) -> None:
    items = [ScoreItem(str(n), f"<answer>{n % 7}</answer>", "3") for n in range(10_000)]
    progress: list[tuple[int, int]] = []
    async with open_client(service) as client:
        scores = await client.score(
            items, CLEVR[1:], 300, on_progress=lambda done, total: progress.append((done, total))
        )
    assert [score.id for score in scores] == [item.id for item in items]
    assert [score.correct for score in scores] == [n % 7 == 3 for n in range(10_000)]
    done = [count for count, _ in progress]
    assert done == sorted(done) and progress[-1] == (10_000, 10_000) and len(progress) >= 10


def test_clients_wait_for_a_full_queue(tmp_path: Path) -> None:
    async def score_by_two(running: Running) -> list[ItemScore]:
        items = [ScoreItem(str(n), GOOD, "2") for n in range(1000)]
        async with open_client(running) as one, open_client(running) as other:
            first, second = await asyncio.gather(*(c.score(items, CLEVR, 120) for c in (one, other)))
        return [*first, *second]

    with started(tmp_path, queue_items=256) as running:
        scores = asyncio.run(score_by_two(running))
    assert [score.correct for score in scores] == [True] * 2000


async def test_unset_correct_stays_unset(service: Running) -> None:
    async with open_client(service) as client:
        (score,) = await client.score([ScoreItem("a", GOOD, "2")], CLEVR[:1], 30)
    assert score.correct is None and score.score == 1.0


async def test_an_unscorable_item_carries_its_error(service: Running) -> None:
    items = [ScoreItem("a", GOOD, "2"), ScoreItem("b", GOOD, "2")]
    async with open_client(service) as client:
        raised = await client.score(items, [ScorerConfig(name="judges:raises")], 30)
        stuck = await client.score(items[:1], [ScorerConfig(name="judges:slow")], 30, item_timeout_s=0.2)
        fine = await client.score(items, CLEVR, 30)
        counters = (await client.status()).counters
    assert [score.error.reason for score in raised if score.error] == [Reason.INTERNAL] * 2
    assert raised[0].error and "judge is broken" in raised[0].error.message
    assert stuck[0].error and stuck[0].error.reason is Reason.DEADLINE
    assert all(score.error is None for score in fine)
    assert counters["items_unscorable_deadline"] >= 1 and counters["items_unscorable_internal"] >= 2


async def test_large_calls_are_split_and_keep_their_order(service: Running) -> None:
    items = [
        ScoreItem(f"{n}", f"<answer>{n}</answer>" + "x" * 20_000 * (n % 3), str(n - n % 2))
        for n in range(700)
    ]
    async with open_client(service) as client:
        batches = await asyncio.gather(*(client.score(items, CLEVR[1:], 60) for _ in range(2)))
    for scores in batches:
        assert [score.id for score in scores] == [item.id for item in items]
        assert [score.correct for score in scores] == [n % 2 == 0 for n in range(700)]


def test_clients_in_threads(service: Running) -> None:
    def score(number: int) -> bool | None:
        async def call() -> bool | None:
            async with open_client(service) as client:
                return (await client.score([ScoreItem("a", GOOD, str(number))], CLEVR, 30))[0].correct

        return asyncio.run(call())

    with ThreadPoolExecutor(4) as threads:  # RWD-11: no thread of the caller matters
        assert list(threads.map(score, range(4))) == [False, False, True, False]


async def test_refusals_are_typed(service: Running) -> None:
    async with open_client(service) as client:
        for scorers, reason in [
            ([ScorerConfig(name="formt")], Reason.NOT_FOUND),
            ([ScorerConfig(name="os:getcwd")], Reason.INVALID_REQUEST),
            ([ScorerConfig(name="format", params={"tag": "x"})], Reason.INVALID_REQUEST),
            ([], Reason.INVALID_REQUEST),
        ]:
            with pytest.raises(OmnifleetError) as caught:
                await client.score([], scorers, 10)
            assert caught.value.reason is reason and not caught.value.retryable
        with pytest.raises(OmnifleetError) as late:
            await client.score([ScoreItem("a", "", "")], [ScorerConfig(name="judges:slow")], 0.3)
        assert late.value.reason is Reason.DEADLINE
    with pytest.raises(OmnifleetError) as stranger:
        async with RewardClient.open(service.grpc, "wrong"):
            pass
    assert stranger.value.reason is Reason.UNAUTHENTICATED


async def test_scorers_and_reachable_maximum(service: Running) -> None:
    async with open_client(service) as client:
        scorers = {f"{s.name}@{s.version}": s for s in await client.list_scorers()}
        plain = await client.reachable_maximum(CLEVR)
        opened = await client.reachable_maximum(CLEVR, "assistant\n<think>\n")
        assert (await client.status()).state == "serving"
    assert set(scorers["format@1"].params_schema["properties"]) == {"think_tag", "answer_tag"}
    assert any(name.startswith("judges:slow@src-") for name in scorers)
    assert plain.maximum == pytest.approx(1.0) and opened.maximum == pytest.approx(0.95)
    assert "<think>" not in opened.example and plain.reward_version == opened.reward_version


async def test_http(service: Running) -> None:
    body = {
        "scorers": [config.model_dump() for config in CLEVR],
        "items": [{"id": "a", "response": GOOD, "ground_truth": "2"}],
    }
    bearer = {"authorization": f"Bearer {service.secret}"}
    async with httpx.AsyncClient(base_url=f"http://{service.http}", timeout=10) as http:
        scored = await http.post("/v1/score", json=body, headers=bearer)
        assert scored.status_code == 200
        assert scored.json()["scores"][0]["score"] == pytest.approx(1.0)
        assert scored.json()["scores"][0]["components"]["exact_alnum@1"] == {
            "score": 1.0,
            "correct": True,
            "mark": "scored",
        }
        assert (await http.post("/v1/score", json=body)).status_code == 401
        typo = await http.post("/v1/score", json=body | {"item": []}, headers=bearer)
        assert typo.status_code == 400 and "items" in typo.json()["error"]["message"]
        assert (await http.post("/v1/score", content=b"{", headers=bearer)).status_code == 400
        assert (await http.get("/readyz")).json() == {"ready": True}
        assert "omnifleet_reward_items_total" in (await http.get("/metrics")).text
        listed = (await http.get("/v1/scorers", headers=bearer)).json()["scorers"]
        assert {"format", "exact_alnum"} <= {scorer["name"] for scorer in listed}


def test_a_killed_service_leaves_no_stuck_scorer(tmp_path: Path) -> None:
    with started(tmp_path) as running:
        scorers = asyncio.run(kill_while_scoring(running))
        end = time.monotonic() + 10
        while any(process_lives(pid) for pid in scorers):
            assert time.monotonic() < end, "a scorer outlived its service"
            time.sleep(0.01)


async def kill_while_scoring(running: Running) -> list[int]:
    """Kill -9 the service while one of its scorers hangs; the pids of its scorers."""
    async with open_client(running) as client:
        slow = asyncio.create_task(
            client.score([ScoreItem("a", "", "")], [ScorerConfig(name="judges:slow")], 30)
        )
        async with asyncio.timeout(10):
            while not (await client.status()).counters["processes_busy"]:  # noqa: ASYNC110 - another process's state
                await asyncio.sleep(0.01)
        scorers = children(running.process)
        running.process.kill()
        with pytest.raises(OmnifleetError) as caught:
            await slow
    assert caught.value.reason is Reason.UNAVAILABLE and caught.value.retryable
    return scorers


def test_commands() -> None:
    runner = CliRunner()
    scored = runner.invoke(app, ["score", GOOD, "--truth", "2"])
    assert json.loads(scored.stdout)["score"] == pytest.approx(1.0)
    assert "exact_alnum@1" in runner.invoke(app, ["list"]).stdout
    assert "weight above 0" in str(runner.invoke(app, ["score", "x", "--scorer", "format=-1"]).output)


def test_bad_settings_give_one_clear_line(tmp_path: Path) -> None:
    def ends_with(*arguments: str) -> str:
        done = subprocess.run(
            [*COMMAND, str(tmp_path), *arguments], capture_output=True, text=True, timeout=30
        )
        assert done.returncode != 0 and "Traceback" not in done.stderr
        return done.stderr

    assert "did you mean 'processes'" in ends_with("--set", "reward_service.proceses=2")
    assert "no_such_module" in ends_with("--set", "reward_service.modules=[no_such_module]")
