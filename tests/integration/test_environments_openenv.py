"""An OpenEnv server, the real one, played over its WebSocket against a real gateway with a scripted engine."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from omnifleet.environments import Crashed, Lost, Scored
from omnifleet.environments.adapters.openenv import OpenEnv
from omnifleet.environments.play import play
from tests.contract.gateway_world import write_tokenizer
from tests.integration.nemo_gym_world import environment_folder, free_port
from tests.integration.test_environments import order, scripted, talking, warm
from tests.support_run import until

pytestmark = pytest.mark.timeout(240)
SERVER = Path(__file__).with_name("openenv_server.py")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    port, log = free_port(), tmp_path_factory.mktemp("openenv") / "log"
    address = f"http://127.0.0.1:{port}"
    python = environment_folder() / "bin" / "python"
    with log.open("wb") as out:
        process = subprocess.Popen([python, SERVER, str(port)], stdout=out, stderr=out)

    def up() -> bool:
        assert process.poll() is None, log.read_text()[-2000:]
        try:
            return httpx.get(f"{address}/health", trust_env=False).is_success
        except httpx.TransportError:
            return False

    try:
        until(up, 120, lambda: log.read_text()[-2000:])
        yield address
    finally:
        process.kill()
        process.wait()


async def test_every_reply_is_a_step_and_rewards_add_up(server: str, tmp_path: Path) -> None:
    gym = OpenEnv(server, "Guess: {}!", show="hint", steps=3)
    task = gym.tasks("train", 4, 0)[3]
    assert gym.tasks("train", 4, 0)[3] == task and gym.tasks("val", 4, 0)[3] != task
    number = random.Random(task.extra["seed"]).randrange(10)
    wrong = (number + 1) % 10
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, worker, http):
        await warm(http)
        worker.replies += [scripted(here, str(wrong)), scripted(here, str(number))]
        played = await play(gym, order(task), http)
        assert played.outcome == Scored(0.75, {"steps": 2.0, "done": 1.0})
        assert played.episode is not None and played.episode.turns == 2
        renderer = here.gateway.renderer.now
        assert renderer is not None
        seen = renderer.decode(list(worker.requests[-1].tokens.token_ids))
        assert "Guess: a number of one digit!" in seen
        assert ("higher" if wrong < number else "lower") in seen

        worker.replies += [scripted(here, "dunno")] * 3
        played = await play(gym, order(task, "used up"), http)
        assert played.outcome == Scored(-0.75, {"steps": 3.0, "done": 0.0})

        worker.replies += [scripted(here, "crash")]
        played = await play(gym, order(task, "crash"), http)
        assert isinstance(played.outcome, Crashed) and "a wall" in played.outcome.message

        other = OpenEnv(server, "Guess: {}", action="text", show="hint")
        worker.replies += [scripted(here, "1")]
        played = await play(other, order(task, "field"), http)
        assert isinstance(played.outcome, Lost) and "params.action" in played.outcome.error.knob

        gone = OpenEnv(f"http://127.0.0.1:{free_port()}", "Guess: {}")
        played = await play(gone, order(task, "gone"), http)
        assert isinstance(played.outcome, Lost) and played.outcome.error.retryable
