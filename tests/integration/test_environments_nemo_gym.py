"""The NeMo Gym adapter against a real gateway, with an agent server of the test's own that has two turns, or fails.

NeMo Gym's own servers are played in test_environments_real.py.
"""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse

from omnifleet.environments import Crashed, Lost, PromptError, Scored, Task
from omnifleet.environments.adapters.nemo_gym import Collected, NemoGym, params
from omnifleet.environments.play import play
from omnifleet.errors import Reason
from omnifleet.http import http_serving
from omnifleet.types import VersionBound
from tests.contract.gateway_world import PICTURE, PICTURE_BYTES, v, write_tokenizer
from tests.integration.test_environments import order, scripted, talking, warm

pytestmark = pytest.mark.timeout(120)
PLACEHOLDER = 258
ROW = {"responses_create_params": {"input": [{"role": "user", "content": "hello"}], "max_output_tokens": 32}}


class Agent:
    """Asks twice over Responses as NeMo Gym's simple agent does: every item goes back as it came, the last block is kept."""

    def __init__(self, gateway: str) -> None:
        self._gateway = gateway
        self.refuse: str = ""
        self.between: Any = "and?"
        self.said: dict[str, Any] = {}

    def app(self, address: list[str]) -> FastAPI:
        app = FastAPI()

        @app.get("/global_config_dict_yaml")
        async def config() -> str:
            host, _, port = address[0].rpartition(":")
            return f"mine:\n  responses_api_agents:\n    simple_agent: {{host: {host}, port: {port}}}\n"

        @app.post("/run")
        async def run(http: Request) -> JSONResponse:
            if self.refuse:
                return JSONResponse(self.refuse, status_code=500)
            row = await http.json()
            body = row["responses_create_params"]
            asked, output = list(body["input"]), []
            async with httpx.AsyncClient(base_url=self._gateway, timeout=60) as client:
                for _ in range(2):
                    reply = await client.post("/v1/responses", json={**body, "input": asked})
                    if not reply.is_success:
                        return JSONResponse(f"calling an inner server: {reply.content!r}", status_code=500)
                    response = reply.json()
                    output += response["output"]
                    asked += [*response["output"], {"role": "user", "content": self.between}]
            self.said = {**row, "response": {**response, "output": output}, "reward": 0.5}
            return JSONResponse(self.said)

        return app


@asynccontextmanager
async def agent_server(gateway: str) -> AsyncIterator[tuple[Agent, str]]:
    agent, address = Agent(gateway), [""]
    async with http_serving(agent.app(address), "127.0.0.1:0", knob="") as bound:
        address[0] = bound
        yield agent, f"http://{bound}"


async def test_an_agent_s_turns_are_one_sequence_with_the_versions_of_each(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps(ROW) + "\n")
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, worker, http):
        await warm(http)
        async with agent_server(here.http) as (agent, head):
            gym = NemoGym(str(rows), head, agent="mine")
            (task,) = gym.tasks("train", None, 0)
            assert task.text == "hello"
            replies = [scripted(here, "one"), scripted(here, "twice")]
            worker.replies += replies
            played = await play(gym, order(task), http)
            assert played.outcome == Scored(0.5)
            episode = played.episode
            assert episode is not None and episode.turns == 2
            own = [token for token, mask in zip(episode.token_ids, episode.mask, strict=True) if mask]
            assert own == replies[0] + replies[1] and 0 in episode.mask
            assert {span.version for span in episode.spans} == {v(5)}
            first, second = worker.requests[-2:]
            assert (first.identity.session, first.sampling.max_tokens) == ("s", 32)
            seen = list(second.tokens.token_ids)
            assert (episode.prompt_token_ids + episode.token_ids)[: len(seen)] == seen

            said = {**agent.said, "_ng_task_index": 0, "_ng_rollout_index": 0}
            said["response"] = json.loads(json.dumps(said["response"]))
            (tmp_path / "out.jsonl").write_text(json.dumps(said) + '\n{"_ng_task_index": 0, "_ng')
            collected = Collected(str(tmp_path / "out.jsonl"), str(rows))
            (task,) = collected.tasks("train", 1, 0)
            again = await play(collected, order(task, "again"), http)
            assert again.outcome == Scored(0.5) and again.episode == episode

            ahead = replace(order(task, "ahead"), bound=VersionBound(min=v(6)))
            played = await play(collected, ahead, http)
            assert isinstance(played.outcome, PromptError) and "collect again" in played.outcome.message

            del said["response"]["omnifleet"]["earlier"]
            (tmp_path / "less.jsonl").write_text(json.dumps(said) + "\n")
            lacking = Collected(str(tmp_path / "less.jsonl"), str(rows))
            played = await play(lacking, order(task, "lacking"), http)
            assert isinstance(played.outcome, Lost) and played.outcome.error.reason is Reason.CORRUPT


def shown(data: bytes) -> dict[str, str]:
    """A picture as a part of a Responses message."""
    url = "data:image/png;base64," + base64.b64encode(data).decode()
    return {"type": "input_image", "detail": "auto", "image_url": url}


async def test_pictures_of_a_row_and_of_a_later_turn_are_media_of_the_episode(tmp_path: Path) -> None:
    asked = {"role": "user", "content": [{"type": "input_text", "text": "how many?"}, shown(PICTURE_BYTES)]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "responses_create_params": {"input": [asked]}}) + "\n")
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, worker, http):
        await warm(http)
        async with agent_server(here.http) as (agent, head):
            agent.between = [{"type": "input_text", "text": "and now?"}, shown(b"the same, enlarged")]
            gym = NemoGym(str(rows), head, agent="mine")
            (task,) = gym.tasks("train", None, 0)
            assert task.text == "how many?"
            replies = [scripted(here, "one"), scripted(here, "two")]
            worker.replies += replies
            episode = (await play(gym, order(task), http)).episode
            assert episode is not None and episode.turns == 2
            first, second = worker.requests[-2:]
            assert [m.digest for m in first.media] == [PICTURE.digest]
            assert [m.digest for m in second.media] == [ref.digest for ref in episode.media]
            assert episode.media[0] == PICTURE and len(set(episode.media)) == 2
            assert episode.prompt_token_ids.count(PLACEHOLDER) == 1
            between = [t for t, own in zip(episode.token_ids, episode.mask, strict=True) if not own]
            assert between.count(PLACEHOLDER) == 1, (
                "the picture of the later turn has its place, and does not train"
            )

            said = {**agent.said, "_ng_task_index": 0, "_ng_rollout_index": 0}
            (tmp_path / "out.jsonl").write_text(json.dumps(said) + "\n")
            collected = Collected(str(tmp_path / "out.jsonl"), str(rows))
            (task,) = collected.tasks("train", 1, 0)
            assert (await play(collected, order(task, "again"), http)).episode == episode


async def test_a_picture_that_cannot_be_had_is_the_row_s_fault(tmp_path: Path) -> None:
    asked = {"role": "user", "content": [{"type": "input_image", "image_url": "http://127.0.0.1/x.png"}]}
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "responses_create_params": {"input": [asked]}}) + "\n")
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, _, http):
        await warm(http)
        async with agent_server(here.http) as (_, head):
            gym = NemoGym(str(rows), head, agent="mine")
            played = await play(gym, order(gym.tasks("train", None, 0)[0]), http)
            assert isinstance(played.outcome, Lost) and not played.outcome.error.retryable


async def test_refusals_of_the_gateway_show_through_and_other_failures_are_crashes(tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({**ROW, "agent_ref": {"name": "mine"}}) + "\n")
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, worker, http):
        await warm(http)
        async with agent_server(here.http) as (agent, head):
            gym = NemoGym(str(rows), head)
            (task,) = gym.tasks("train", 1, 0)
            agent.between = "x" * 100_000
            worker.replies += [scripted(here, "one")]
            body = {**task.extra["row"], "responses_create_params": {"input": [{"type": "no such item"}]}}
            bad = Task("bad", "", extra={"row": body})
            played = await play(gym, order(bad), http)
            assert isinstance(played.outcome, Lost), played.outcome
            assert (
                played.outcome.error.reason is Reason.INVALID_REQUEST and not played.outcome.error.retryable
            )
            agent.refuse = "ValueError('a wall')"
            played = await play(gym, order(task, "wall"), http)
            assert isinstance(played.outcome, Crashed) and "a wall" in played.outcome.message
            unknown = Task("u", "", extra={"row": {**ROW, "agent_ref": {"name": "nobody"}}})
            played = await play(gym, order(unknown, "nobody"), http)
            assert isinstance(played.outcome, Crashed) and "runs no agent 'nobody'" in played.outcome.message
        played = await play(gym, order(task, "gone"), http)
        assert isinstance(played.outcome, Lost) and played.outcome.error.reason is Reason.UNAVAILABLE


def test_a_row_keeps_its_fields_and_gets_the_episodes_terms() -> None:
    terms = {
        "temperature": 1.0, "top_p": 1.0, "top_k": -1, "max_tokens": 64, "stop": [], "seed": 7, "return_provenance": True,
        "identity": {"session": "s"}, "weight_version": {"min": "r/l:1"},
    }  # fmt: skip
    own = {
        "input": "x",
        "temperature": 0.2,
        "metadata": {"level": "3", "extra_body": '{"seed": 1, "priority": 2}'},
    }
    made = params(own, terms)
    assert (made["input"], made["temperature"], made["max_output_tokens"]) == ("x", 1.0, 64)
    extra = json.loads(made["metadata"]["extra_body"])
    assert made["metadata"]["level"] == "3" and extra["priority"] == 2 and extra["seed"] == 7
    assert extra["identity"] == {"session": "s"} and extra["weight_version"] == {"min": "r/l:1"}
    assert "max_tokens" not in extra and "temperature" not in extra
