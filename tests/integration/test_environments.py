"""Environments against a real gateway: the examples, the pool of processes, and a run that is trained on one."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from examples.environments.circle_click import CircleClick
from examples.environments.video_question import VideoQuestion
from examples.environments.zoom_puzzle import QUARTERS, ZoomPuzzle
from omnifleet.config.load import dump_recipe, recipe_from_mapping
from omnifleet.environments import Answered, Crashed, PromptError, Scored, Task, TimedOut
from omnifleet.environments.play import Order, play
from omnifleet.environments.pool import Cast, Pool
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, Identity, MediaKind, MediaRef, Sampling, VersionBound
from omnifleet_rollout.gateway.renderer import RendererLoader
from omnifleet_trainer.ledger import LedgerReader, SqliteLedger
from tests.contract.gateway_world import IM_END, ScriptedWorker, World, v, world, write_tokenizer
from tests.contract.test_gateway_turns import OneCall
from tests.integration.test_trainer_process import said, services, trainer
from tests.integration.trainer_child import write_model

pytestmark = pytest.mark.timeout(240)
ROOT = Path(__file__).resolve().parents[2]
CLIP = MediaRef(MediaKind.VIDEO, Digest("cd" * 32))
PICTURE = MediaRef(MediaKind.IMAGE, Digest("ab" * 32))

GYM = '''
import asyncio, os, time
from omnifleet.environments import Environment, Scored

class Rough(Environment):
    """Does what the task's text says."""

    async def run(self, session):
        match session.task.text:
            case "die":
                os._exit(3)
            case "hang":
                time.sleep(600)
            case "raise":
                raise RuntimeError("a wall")
            case "stubborn":
                while True:
                    try:
                        await asyncio.sleep(600)
                    except asyncio.CancelledError:
                        pass
            case "sleep":
                await asyncio.sleep(600)
        reply = await session.ask("hello")
        await asyncio.sleep(session.task.extra.get("nap", 0))
        return Scored(float(reply.tokens))
'''


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@asynccontextmanager
async def talking(
    path: Path, checkpoint: Path, **settings: Any
) -> AsyncIterator[tuple[World, ScriptedWorker, httpx.AsyncClient]]:
    async with world(path, renderer=RendererLoader(checkpoint), **settings) as here:
        worker = await here.worker("w-1", 5, max_running=64)
        async with httpx.AsyncClient(base_url=here.http, timeout=120) as http:
            yield here, worker, http


def order(task: Task, session: str = "s", timeout_s: float = 60.0) -> Order:
    sampling = Sampling(max_tokens=64, seed=1)
    who = Identity("test", environment="gym", session=session)
    return Order("gym", task, who, sampling, VersionBound(min=v(5)), timeout_s)


def scripted(here: World, text: str) -> list[int]:
    renderer = here.gateway.renderer.now
    assert renderer is not None
    return [*(renderer.encode(chr(byte))[0] for byte in text.encode()), IM_END]


async def warm(http: httpx.AsyncClient) -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}
    (await http.post("/v1/chat/completions", json=body)).raise_for_status()


async def test_the_puzzles_second_picture_is_made_by_the_environment(
    tmp_path: Path, checkpoint: Path
) -> None:
    gym = ZoomPuzzle()
    task = gym.tasks("train", 2, 0)[1]
    assert gym.tasks("train", 2, 0)[1] == task and gym.tasks("val", 2, 0)[1] != task
    quarter = QUARTERS[task.extra["quarter"]]
    async with talking(tmp_path, checkpoint) as (here, worker, http):
        await warm(http)
        worker.replies += [scripted(here, f"the {quarter} one"), scripted(here, f"it is {task.answer}")]
        result = await play(gym, order(replace(task, pictures=(), media=(PICTURE,))), http)
        assert result.outcome == Scored(1.0, {"quarter": 1.0, "digit": 1.0})
        episode = result.episode
        assert episode is not None and episode.turns == 2 and len(set(episode.media)) == 2
        own = [token for token, mask in zip(episode.token_ids, episode.mask, strict=True) if mask]
        assert own == scripted(here, f"the {quarter} one") + scripted(here, f"it is {task.answer}")
        whole = episode.prompt_token_ids + episode.token_ids
        seen = list(worker.requests[-1].tokens.token_ids)
        assert whole[: len(seen)] == seen and seen.count(258) == 2
        assert {span.version for span in episode.spans} == {v(5)}
        worker.replies += [scripted(here, "dunno"), scripted(here, "none")]
        result = await play(gym, order(replace(task, pictures=(), media=(PICTURE,)), "other"), http)
        assert isinstance(result.outcome, Scored) and result.outcome.reward == 0.0


async def test_circle_click_takes_the_first_click(tmp_path: Path, checkpoint: Path) -> None:
    gym = CircleClick(size=200)
    task = replace(gym.tasks("train", 1, 0)[0], media=(PICTURE,), pictures=())
    x, y, radius = task.extra["circle"]
    async with talking(tmp_path, checkpoint) as (here, worker, http):
        await warm(http)
        renderer = here.gateway.renderer.now
        assert renderer is not None
        from omnifleet_rollout.gateway.parsing import Parsers

        parsers = Parsers(renderer.tokenizer, lambda tools: type("Request", (), {"tools": tools}), OneCall)

        async def get() -> Parsers:
            return parsers

        here.gateway.parsers.get = get  # type: ignore[method-assign]
        rewards = []
        for number, arguments in enumerate(({"x": x, "y": y}, {"x": x + radius + 1, "y": y}, {"x": "left"})):
            call = json.dumps({"name": "click", "arguments": arguments})
            worker.replies += [scripted(here, f"<tool_call>{call}</tool_call>")]
            result = await play(gym, order(task, f"s{number}"), http)
            assert isinstance(result.outcome, Scored), result
            rewards.append(result.outcome.reward)
        worker.replies += [scripted(here, "I would rather not")]
        result = await play(gym, order(task, "talks"), http)
        assert rewards == [1.0, 0.0, 0.0] and result.outcome == Scored(0.0, {"called": 0.0})
        assert isinstance((await play(gym, order(Task("t", "x")), http)).outcome, PromptError)


async def test_a_question_about_a_clip_is_left_to_the_scorers(tmp_path: Path, checkpoint: Path) -> None:
    async with talking(tmp_path, checkpoint) as (here, worker, http):
        await warm(http)
        worker.replies += [scripted(here, "it is B"), scripted(here, r"\boxed{B}")]
        result = await play(VideoQuestion(), order(Task("t", "what moves?", media=(CLIP,))), http)
        assert result.outcome == Answered(r"\boxed{B}")
        assert result.episode is not None and result.episode.media == (CLIP,)
        assert isinstance((await play(VideoQuestion(), order(Task("t", "x")), http)).outcome, PromptError)


@pytest.fixture
def rough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "rough_gym.py").write_text(GYM)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "rough_gym:Rough"


async def test_a_process_that_dies_or_hangs_costs_only_the_guilty_episode(
    tmp_path: Path, checkpoint: Path, rough: str
) -> None:
    async with talking(tmp_path, checkpoint) as (here, _worker, http):
        await warm(http)
        cast = Cast({"gym": (rough, {})}, here.http)
        async with Pool(cast, processes=1, episodes=64, hang_s=6.0) as pool:
            texts = ["nap", "nap", "die", "raise", "nap"]
            tasks = [Task(str(i), text, extra={"nap": 0.3}) for i, text in enumerate(texts)]
            orders = [order(task, f"s{i}") for i, task in enumerate(tasks)]
            played = await asyncio.gather(*(pool.play(o) for o in orders))
            kinds = [type(p.outcome) for p in played]
            assert kinds == [Scored, Scored, Crashed, Crashed, Scored], played
            assert "exit code 3" in str(played[2].outcome) and "a wall" in str(played[3].outcome)
            hung, fine = await asyncio.gather(
                pool.play(order(Task("h", "hang"), "h")), pool.play(order(Task("f", "x"), "f"))
            )
            assert isinstance(hung.outcome, Crashed) and "blocked" in hung.outcome.message
            assert isinstance(fine.outcome, Scored)
            late = await pool.play(order(Task("s", "sleep"), "late", timeout_s=0.3))
            assert late.outcome == TimedOut(0.3)
            assert pool.counts.episodes == 8 and pool.counts.restarts >= 1


@pytest.mark.parametrize(
    "count", [120, pytest.param(2000, marks=[pytest.mark.soak, pytest.mark.timeout(600)])]
)
async def test_many_episodes_at_once_wait_for_a_busy_gateway(
    tmp_path: Path, checkpoint: Path, rough: str, count: int
) -> None:
    async with talking(tmp_path, checkpoint, queue_per_run=max(16, count // 8)) as (here, _, http):
        await warm(http)
        cast = Cast({"gym": (rough, {})}, here.http)
        async with Pool(cast, processes=1, episodes=count, hang_s=60.0) as pool:
            short = Sampling(max_tokens=2, seed=1)
            orders = [order(Task(str(i), "x"), f"s{i}", timeout_s=500.0) for i in range(count)]
            played = await asyncio.gather(*(pool.play(replace(o, sampling=short)) for o in orders))
        assert [p.outcome for p in played] == [Scored(2.0)] * count
        assert here.gateway.counters.count("refusals_overloaded") > 0


async def test_cancelling_an_episode_frees_its_place_and_a_pool_says_what_it_cannot_load(
    tmp_path: Path, rough: str
) -> None:
    cast = Cast({"gym": (rough, {})}, "http://127.0.0.1:9")
    async with Pool(cast, processes=1, episodes=1, hang_s=60.0) as pool:
        first = asyncio.create_task(pool.play(order(Task("s", "sleep"))))
        second = asyncio.create_task(pool.play(order(Task("r", "raise"))))
        await asyncio.sleep(
            0.1
        )  # in which a pool without bounds would have played it: nothing tells that it waits
        assert not second.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        assert isinstance((await second).outcome, Crashed)
    with pytest.raises(OmnifleetError, match="no Environment") as caught:
        async with Pool(Cast({"gym": ("json:nothing", {})}, ""), processes=1, episodes=1, hang_s=60.0):
            pass
    assert caught.value.reason is Reason.INVALID_CONFIG


TEMPLATE = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for part in m.content %}"
    "{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %};{% endfor %}"
    "{% if add_generation_prompt %}:{% endif %}"
)


def write_recipe(folder: Path) -> Path:
    run_dir = folder / "run"
    run_dir.mkdir()
    write_model(folder / "model")
    settings = folder / "model" / "tokenizer_config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"chat_template": TEMPLATE}))
    gym = {"environment": "zoom_puzzle:ZoomPuzzle", "params": {"side": 56}}
    body = {
        "run": {"name": "run", "root": str(folder)},
        "model": {"path": str(folder / "model")},
        "reward": [{"name": "format"}],
        "sampling": {"max_tokens": 6, "top_k": 3},
        "rollout": {"engine": {"return_routed_experts": True, "return_sampling_mask": True}},
        "data": {
            "train": {**gym, "size": 8},
            "heldout": {**gym, "split": "val"},
            "max_prompt_tokens": 200,
        },
        "evaluation": {"size": 2},
        "trainer": {
            "backend": "fake", "steps": 3, "prompts_per_step": 2, "generations_per_prompt": 2, "checkpoint_every": 2,
            "rollout_timeout_s": 60, "step_timeout_s": 120,
        },
        "media": {"store": str(folder / "store")},
    }  # fmt: skip
    (run_dir / "recipe.yaml").write_text(dump_recipe(recipe_from_mapping(body, "test")))
    return run_dir


async def test_a_run_is_trained_on_an_environment_that_a_recipe_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'examples' / 'environments'}:{ROOT}")
    run_dir = write_recipe(tmp_path)
    async with services(run_dir):
        async with trainer(run_dir) as child:
            assert await asyncio.wait_for(child.wait(), 180) == 0, said(run_dir)
    counts = LedgerReader(run_dir / "ledger.sqlite").counts()
    assert (counts.consumed, counts.consumed_twice, counts.lost, counts.given_up) == (12, 0, 0, 0)
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [0, 1, 2, 3]
    assert "heldout_reward" in rows[-1] and "reward/quarter" in rows[1] and rows[-1]["lag_max"] <= 1
    assert {(row["replayed/experts"], row["replayed/sampling_masks"]) for row in rows[1:]} == {(1.0, 1.0)}
    consumed = [row for row in LedgerReader(run_dir / "ledger.sqlite").rows(state="consumed")]
    ledger = SqliteLedger(run_dir / "ledger.sqlite", owner="test")
    try:
        groups = [ledger.load_group(group) for group in dict.fromkeys(row.group for row in consumed)]
    finally:
        ledger.close()
    for trajectory in (t for group in groups for t in group.trajectories):
        assert 0 in trajectory.mask and len(trajectory.mask) == len(trajectory.token_ids)
        own = sum(trajectory.mask)
        assert own == 12 and trajectory.reward_version == "environment:zoom_puzzle:ZoomPuzzle"
        # both pictures, the second of which only this environment could have made
        assert len(trajectory.media) == 2 and trajectory.media[0] != trajectory.media[1]
        pictures = [token for token in trajectory.token_ids if token == 1]
        assert len(pictures) == 4
