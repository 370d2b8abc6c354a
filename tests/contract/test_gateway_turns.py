"""Many turns over HTTP: one growing exact token prefix, whatever the text looks like; and why a history is refused."""

from __future__ import annotations

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from omnifleet_rollout.gateway.parsing import Parsers
from omnifleet_rollout.gateway.renderer import RendererLoader
from tests.contract.gateway_world import IM_END, ScriptedWorker, World, world, write_tokenizer

MERGES = (("a", "p"), ("p", "l"), ("pl", "e"), ("ap", "ple"))
AP, PLE, APPLE = 260, 262, 263
SESSION = {"x-omnifleet-session": "s"}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a byte, and `apple`, which is one token or two."""
    return write_tokenizer(tmp_path_factory.mktemp("apple"), MERGES)


@asynccontextmanager
async def talking(
    path: Path, checkpoint: Path
) -> AsyncIterator[tuple[World, httpx.AsyncClient, ScriptedWorker]]:
    async with world(path, renderer=RendererLoader(checkpoint)) as here:
        worker = await here.worker("w-1")
        async with httpx.AsyncClient(base_url=here.http, headers=SESSION, timeout=120) as http:
            yield here, http, worker


async def say(http: httpx.AsyncClient, messages: Sequence[Any], **fields: Any) -> httpx.Response:
    return await http.post(
        "/v1/chat/completions", json={"messages": list(messages), "max_tokens": 4, **fields}
    )


def user(text: str, picture: bytes = b"") -> dict[str, Any]:
    if not picture:
        return {"role": "user", "content": text}
    url = "data:image/png;base64," + base64.b64encode(picture).decode()
    return {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url}}, {"type": "text", "text": text}],
    }


def prompt(worker: ScriptedWorker, turn: int = -1) -> list[int]:
    return list(worker.requests[turn].tokens.token_ids)


def reply_of(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    message: dict[str, Any] = response.json()["choices"][0]["message"]
    return message


async def test_TOK_01_the_next_turn_has_the_sampled_ids_not_those_of_their_text(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with talking(tmp_path, checkpoint) as (_, http, worker):
        worker.replies += [[AP, PLE, IM_END], [APPLE, IM_END], [APPLE]]
        messages = [user("fruit?")]
        first = reply_of(await say(http, messages))
        assert first["content"] == "apple"
        messages += [first, user("again")]
        second = reply_of(await say(http, messages))
        before = prompt(worker, 0)
        assert prompt(worker)[: len(before) + 3] == [*before, AP, PLE, IM_END]
        messages += [second, user("and")]
        reply_of(await say(http, messages))
        assert prompt(worker)[: len(prompt(worker, 1)) + 2] == [*prompt(worker, 1), APPLE, IM_END]
        # What the template puts after a reply that did not end itself comes whole, and once.
        messages += [{"role": "assistant", "content": "apple"}, user("!")]
        reply_of(await say(http, messages))
        rest = prompt(worker)[len(prompt(worker, 2)) + 1 :]
        assert rest[0] == IM_END and rest.count(IM_END) == 2


async def test_thirty_turns_with_pictures_are_one_growing_prefix_and_survive_a_restart(
    tmp_path: Path, checkpoint: Path
) -> None:
    messages: list[Any] = []
    known: list[int] = []
    for restart in range(2):  # the second half runs in a gateway that never saw the first
        async with talking(tmp_path, checkpoint) as (here, http, worker):
            for turn in range(15 * restart, 15 * restart + 15):
                messages.append(user(f"turn {turn}", b"%d" % turn))
                message = reply_of(await say(http, messages, seed=turn, return_token_ids=True))
                ids, request = prompt(worker), worker.requests[-1]
                assert ids[: len(known)] == known and ids.count(258) == len(request.media) == turn + 1
                assert len({ref.digest for ref in request.media}) == turn + 1
                known = [*ids, *message["generation_token_ids"]]
                assert len(message["generation_token_ids"]) == 4
                messages.append({"role": "assistant", "content": message["content"]})
            assert here.gateway.dispatcher.requests == 0


async def test_a_session_stays_with_its_worker_over_a_gateway_restart(
    tmp_path: Path, checkpoint: Path
) -> None:
    homes: list[dict[str, str]] = []
    for _ in range(2):
        async with world(tmp_path, renderer=RendererLoader(checkpoint)) as here:
            # Two processes that outlive the gateway: the same ids and instances join again.
            workers = [await here.worker("w-0"), await here.worker("w-1")]
            async with httpx.AsyncClient(base_url=here.http, timeout=120) as http:
                for session in ("a", "b", "c") if not homes else ("c", "a", "b"):
                    headers = {"x-omnifleet-session": session}
                    reply_of(
                        await http.post(
                            "/v1/chat/completions",
                            json={"messages": [user("x")], "max_tokens": 1},
                            headers=headers,
                        )
                    )
            homes.append({r.identity.session: w.id for w in workers for r in w.requests})
    assert homes[0] == homes[1] and homes[0].keys() == {"a", "b", "c"}


async def test_n_replies_are_n_branches_and_each_goes_on_from_its_own_tokens(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with talking(tmp_path, checkpoint) as (_, http, worker):
        response = await say(http, [user("pick")], n=3, seed=1)
        texts = [choice["message"]["content"] for choice in response.json()["choices"]]
        assert len(set(texts)) == 3
        first = prompt(worker, 0)
        for index, text in enumerate(texts):
            reply_of(await say(http, [user("pick"), {"role": "assistant", "content": text}, user("on")]))
            made = [40 + ((1 + index) * 31 + i * 7) % 50 for i in range(4)]
            assert prompt(worker)[: len(first) + 4] == [*first, *made]


@pytest.mark.parametrize(
    ("change", "cause"),
    [
        (lambda m: m[2:], "truncated: 2 messages before messages[1]"),
        (lambda m: [{**m[0], "content": "other"}, *m[1:]], "messages[0] was edited"),
        (lambda m: [m[0], {**m[1], "content": "other"}, m[2]], "messages[1], a sampled reply, was edited"),
        (lambda m: [{"role": "system", "content": "new"}, *m], "messages[0] was edited or put in"),
    ],
)
async def test_a_changed_history_is_refused_with_its_cause_and_a_way_out(
    tmp_path: Path, checkpoint: Path, change: Any, cause: str
) -> None:
    async with talking(tmp_path, checkpoint) as (_, http, worker):
        messages: list[Any] = []
        for turn in range(2):
            messages.append(user(f"turn {turn}"))
            said = reply_of(await say(http, messages, seed=turn))
            messages.append({"role": "assistant", "content": said["content"]})
        messages.append(user("last"))
        changed = change(messages) if "truncated" in cause else change(messages[:3])
        response = await say(http, changed)
        error = response.json()["error"]
        assert (response.status_code, error["code"], error["retryable"]) == (400, "history_changed", False)
        assert cause in error["message"] and "rerender" in error["knob"]
        reply_of(await say(http, changed, on_history_change="rerender"))
        # Another conversation in the session, and the same one without a session, are nobody's edit.
        reply_of(await say(http, [user("a side question")]))
        await http.post(
            "/v1/chat/completions", json={"messages": changed}, headers={"x-omnifleet-session": ""}
        )
        assert len(worker.requests) >= 4


async def test_PLC_03_after_a_sampled_placeholder_nothing_follows_until_the_client_begins_anew(
    tmp_path: Path, checkpoint: Path
) -> None:
    """Its id would count as a second picture, and to leave it out would not be what was sampled: the client decides."""
    image = 258
    async with talking(tmp_path, checkpoint) as (_, http, worker):
        worker.replies += [[AP, PLE, image], [APPLE, IM_END]]
        messages = [user("what?", b"one")]
        first = reply_of(await say(http, messages, return_token_ids=True))
        assert first["content"] == "apple" and first["generation_token_ids"] == [AP, PLE, image]
        messages += [{"role": "assistant", "content": "apple"}, user("sure?")]
        refused = await say(http, messages)
        error = refused.json()["error"]
        assert (refused.status_code, error["code"], error["retryable"]) == (400, "invalid_request", False)
        assert "placeholder that the model sampled" in error["message"] and "rerender" in error["knob"]
        assert len(worker.requests) == 1

        second = reply_of(await say(http, messages, on_history_change="rerender"))
        anew = prompt(worker)
        assert anew.count(image) == len(worker.requests[-1].media) == 1, "the picture's, and no other"
        messages += [second, user("and?")]
        reply_of(await say(http, messages))
        assert prompt(worker)[: len(anew) + 2] == [*anew, APPLE, IM_END], "exact again from there on"


async def test_TOK_03_ids_that_the_client_sends_are_the_prompt_or_an_error(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with talking(tmp_path, checkpoint) as (_, http, worker):
        nobody = {"x-omnifleet-session": ""}
        messages = [user("q", b"one"), {"role": "assistant", "content": "apple"}, user("next")]
        required = [5, 258, 258, 258, 6, AP, PLE]  # expanded, as a reply reports it
        for fields in (
            {"messages": messages, "required_prefix_token_ids": required},
            {
                "messages": [
                    messages[0],
                    {**messages[1], "prompt_token_ids": required[:5], "generation_token_ids": [AP, PLE]},
                    messages[2],
                ]
            },
        ):
            response = await http.post(
                "/v1/chat/completions", json={"max_tokens": 1, **fields}, headers=nobody
            )
            assert response.status_code == 200, response.text
            assert prompt(worker)[:5] == [5, 258, 6, AP, PLE] and len(worker.requests[-1].media) == 1
        for broken in ({"messages": messages[:1]}, {"messages": messages, "required_prefix_token_ids": [5]}):
            fields = {"required_prefix_token_ids": required, **broken}
            assert (await http.post("/v1/chat/completions", json=fields, headers=nobody)).status_code == 400


class OneCall:
    """Stands for a parser that loads the JSON of a call and writes it again, as vLLM's hermes parser does."""

    def __init__(self, tokenizer: Any, tools: Any) -> None:
        self.tools = tools

    def extract_tool_calls(self, text: str, request: Any) -> Any:
        head, found, body = text.partition("<tool_call>")
        calls = []
        if found:
            value = json.loads(body.partition("</tool_call>")[0])
            function = {"name": value["name"], "arguments": json.dumps(value["arguments"], sort_keys=True)}
            calls = [type("Call", (), {"function": type("Function", (), function)})]
        return type("Extracted", (), {"tools_called": bool(calls), "tool_calls": calls, "content": head})


def use_parser(here: World, checkpoint: Path) -> None:
    renderer = here.gateway.renderer.now
    assert renderer is not None
    request = lambda tools: type("Request", (), {"tools": tools})  # noqa: E731
    parsers = Parsers(renderer.tokenizer, request, OneCall)

    async def get() -> Parsers:
        return parsers

    here.gateway.parsers.get = get


TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
ARGUMENTS = '{"b": 1,\n"a":2}'
CALL = f'let me see<tool_call>{{"name": "look", "arguments": {ARGUMENTS}}}</tool_call>'


async def test_TOK_05_tool_calls_keep_the_very_characters_and_ids_that_were_sampled(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with talking(tmp_path, checkpoint) as (here, http, worker):
        reply_of(await say(http, [user("warm")]))
        use_parser(here, checkpoint)
        said = [*CALL.encode()]
        ids = [here.gateway.renderer.now.encode(chr(byte))[0] for byte in said] + [IM_END]
        for stream in (False, True):
            worker.replies += [ids]
            messages: list[Any] = [user(f"where? {stream}")]
            if stream:
                deltas = [d async for d in chunks(http, messages)]
                calls = [call for d in deltas for call in d.get("tool_calls", ())]
                message = {"role": "assistant", "content": "let me see", "tool_calls": calls}
            else:
                response = await say(http, messages, tools=TOOLS)
                assert response.json()["choices"][0]["finish_reason"] == "tool_calls"
                message = reply_of(response)
            [call] = message["tool_calls"]
            assert call["function"] == {"name": "look", "arguments": ARGUMENTS}
            # The client writes the arguments anew, with other spaces and key order; the ids stay as they were.
            again = {**call, "function": {"name": "look", "arguments": '{"a": 2, "b": 1}'}}
            result = {"role": "tool", "tool_call_id": call["id"], "content": "a wall"}
            history = [*messages, {**message, "tool_calls": [again]}, result]
            before = prompt(worker)
            reply_of(await say(http, history, tools=TOOLS))
            assert prompt(worker)[: len(before) + len(ids)] == [*before, *ids]


async def chunks(http: httpx.AsyncClient, messages: Sequence[Any]) -> AsyncIterator[dict[str, Any]]:
    fields = {"messages": list(messages), "tools": TOOLS, "stream": True}
    async with http.stream("POST", "/v1/chat/completions", json=fields) as reply:
        async for line in reply.aiter_lines():
            if line.startswith("data: {"):
                for choice in json.loads(line[6:])["choices"]:
                    yield choice["delta"]


async def test_API_07_responses_say_only_what_the_model_said_and_results_come_back_as_input(
    tmp_path: Path, checkpoint: Path
) -> None:
    async with talking(tmp_path, checkpoint) as (here, http, worker):
        reply_of(await say(http, [user("warm")]))
        use_parser(here, checkpoint)
        encode = here.gateway.renderer.now.encode
        worker.replies += [[*encode(CALL), IM_END], [*encode("a wall"), IM_END]]
        tools = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
        items: list[Any] = [{"role": "user", "content": "where?"}]
        fields = {"tools": tools, "return_token_ids": True}
        first = (await http.post("/v1/responses", json={"input": items, **fields})).json()
        assert [item["type"] for item in first["output"]] == ["message", "function_call"]
        call = first["output"][1]
        assert call["arguments"] == ARGUMENTS and call["generation_token_ids"][-1] == IM_END
        assert "generation_token_ids" not in first["output"][0]
        result = {"type": "function_call_output", "call_id": call["call_id"], "output": "a wall"}
        before = prompt(worker)
        second = (
            await http.post("/v1/responses", json={"input": [*items, *first["output"], result], **fields})
        ).json()
        assert [item["type"] for item in second["output"]] == ["message"]
        assert second["output"][0]["content"][0]["text"] == "a wall"
        assert second["output"][0]["prompt_token_ids"] == prompt(worker)
        assert prompt(worker)[: len(before) + len(call["generation_token_ids"])] == [
            *before,
            *call["generation_token_ids"],
        ]
