"""An agent with a client of its own plays an episode through the address that its environment gave it."""

from __future__ import annotations

from pathlib import Path

import openai
import pytest

from omnifleet.environments import Environment, Lost, Outcome, PromptError, Scored, Session, Task
from omnifleet.environments.endpoint import Endpoint
from omnifleet.environments.play import play
from omnifleet.errors import Reason
from tests.contract.gateway_world import write_tokenizer
from tests.integration.test_environments import order, scripted, talking, warm

pytestmark = pytest.mark.timeout(120)


class Agent(Environment):
    """Asks twice, over OpenAI's client; what it does with the first reply is the task's text."""

    def __init__(self) -> None:
        self._endpoint = Endpoint()

    async def run(self, session: Session) -> Outcome:
        async with (
            self._endpoint.seat(session) as url,
            openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client,
        ):
            said: list[dict[str, str]] = [{"role": "user", "content": "hello"}]
            for _ in range(2):
                if session.task.text == "stream":
                    chunks = await client.chat.completions.create(model="policy", messages=said, stream=True)
                    text = "".join([c.choices[0].delta.content or "" async for c in chunks if c.choices])
                else:
                    reply = await client.chat.completions.create(model="policy", messages=said, temperature=9)
                    text = reply.choices[0].message.content or ""
                said += [{"role": "assistant", "content": text}, {"role": "user", "content": "and?"}]
                if session.task.text == "edit":
                    said[0]["content"] = "goodbye"
            if session.task.text == "nonsense":
                try:
                    await client.chat.completions.create(model="policy", messages=said, n=2)
                except openai.BadRequestError as error:
                    return PromptError(str(error.message))
        return Scored(float(text == "two"))


async def test_what_an_agent_asks_by_itself_is_the_episode(tmp_path: Path) -> None:
    agent = Agent()
    async with talking(tmp_path, write_tokenizer(tmp_path)) as (here, worker, http):
        await warm(http)
        replies = [scripted(here, "one"), scripted(here, "two")]
        worker.replies += replies
        played = await play(agent, order(Task("t", "")), http)
        assert played.outcome == Scored(1.0)
        episode = played.episode
        assert episode is not None and episode.turns == 2
        own = [token for token, mask in zip(episode.token_ids, episode.mask, strict=True) if mask]
        assert own == replies[0] + replies[1]
        assert {r.sampling.temperature for r in worker.requests[-2:]} == {1.0}, (
            "the recipe's, not the agent's"
        )
        assert [r.identity.session for r in worker.requests[-2:]] == ["s", "s"]

        worker.replies += replies
        streamed = await play(agent, order(Task("t", "stream"), "streamed"), http)
        assert streamed == played

        worker.replies += replies
        played = await play(agent, order(Task("t", "nonsense"), "other"), http)
        assert isinstance(played.outcome, PromptError) and "leave out n" in played.outcome.message

        worker.replies += replies
        played = await play(agent, order(Task("t", "edit"), "edited"), http)
        assert isinstance(played.outcome, Lost) and played.outcome.error.reason is Reason.HISTORY_CHANGED
