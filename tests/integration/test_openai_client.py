"""The official `openai` client against a gateway, a media service and a real vLLM engine, each a process of its own.

On a CPU; `tests/gpu/test_openai_gpu.py` runs the same tests with the engine on a GPU.

Tool calls and reasoning can't be had from a random model: a scripted worker says them, vLLM's own parsers read them.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import io
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import yaml
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.rollout import RolloutClient
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Identity, WeightVersion, WorkerState
from omnifleet.wire import rollout_pb2_grpc
from omnifleet.wire.server import serving
from omnifleet_rollout.gateway.renderer import Renderer
from tests.contract.gateway_world import ScriptedWorker

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(600)]

LIMIT = 2048
GATEWAY = {
    "tool_parser": "hermes",
    "reasoning_parser": "deepseek_v3",  # reads reasoning only if the template was told to think
    "clip_frames": 4,
    "suspect_after_s": 100.0,
    "dead_after_s": 200.0,
    "hung_after_s": 300.0,
}
ENGINE = {
    "max_model_len": LIMIT,
    "max_num_seqs": 8,
    "processor_cache_gb": 0.05,
    "images_per_prompt": 32,
    "videos_per_prompt": 2,
    "media_tokens": "stop",  # a ban would bend the logprobs away from those that are scored below
}
ARGUMENTS = '{"b": 1,\n"a":2}'
TOOLS: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


@dataclass(frozen=True)
class Device:
    """What the engine runs on: settings beside ENGINE; how far logprobs of one token may lie apart in two passes."""

    engine: dict[str, Any]
    tolerance: float


CPU = Device(
    {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "block_size": 32, "threads": 1}, tolerance=1e-3
)


@dataclass
class Stack:
    """The three processes of one run."""

    run_dir: Path
    model: Path
    device: Device
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def start(self, app: str, *options: str, name: str) -> None:
        module, _, attribute = app.partition(":")
        code = f"from {module}.cli import {attribute}; {attribute}()"
        with (self.run_dir / f"{name}.log").open("wb") as out:
            command = [sys.executable, "-c", code, "serve", "--run-dir", str(self.run_dir), *options]
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=out))

    def up(self) -> None:
        """Media service, gateway and a worker, warm."""
        self.start("omnifleet_media:app", name="media")
        self.start("omnifleet_rollout:gateway_app", name="gateway")
        self.start("omnifleet_rollout:app", name="worker-0")
        for name in ("media", "gateway", "worker-0"):
            self.wait(name)
        asyncio.run(warm(self))

    def wait(self, name: str) -> None:
        end = time.monotonic() + 500
        while name not in read_records(self.run_dir):
            alive = all(process.poll() is None for process in self.processes)
            assert alive and time.monotonic() < end, self.log(name)
            time.sleep(0.05)

    def log(self, name: str) -> str:
        return (self.run_dir / f"{name}.log").read_text()[-4000:]

    def close(self) -> None:
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def secret(self, scope: Scope) -> str:
        return load_tokens(self.run_dir).secret(scope)

    @property
    def address(self) -> str:
        return read_records(self.run_dir)["gateway"].grpc

    @property
    def url(self) -> str:
        return f"http://{read_records(self.run_dir)['gateway'].http}/v1"

    def client(self) -> openai.AsyncOpenAI:
        secret = self.secret(Scope.ENV)
        return openai.AsyncOpenAI(base_url=self.url, api_key=secret, timeout=120, max_retries=0)


@pytest.fixture(scope="module")
def device() -> Device:
    return CPU


@pytest.fixture(scope="module")
def stack(
    tmp_path_factory: pytest.TempPathFactory, random_checkpoint: Path, device: Device
) -> Iterator[Stack]:
    stack = Stack(tmp_path_factory.mktemp("run"), random_checkpoint, device)
    recipe = {
        "model": {"path": str(random_checkpoint)},
        "sampling": {"max_tokens": 6},
        "gateway": GATEWAY,
        "rollout": {"engine": {**ENGINE, **device.engine}},
    }
    (stack.run_dir / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    load_tokens(stack.run_dir)  # makes the secrets before three processes race for it
    try:
        stack.up()
        yield stack
    finally:
        stack.close()


async def warm(stack: Stack) -> None:
    """The worker serves, and the parsers are loaded."""
    async with stack.client() as client:
        end = time.monotonic() + 300
        while True:
            try:
                await client.chat.completions.create(**chat("hi"))
                return
            except openai.APIStatusError as error:
                assert error.status_code == 503 and time.monotonic() < end, stack.log("gateway")
            await asyncio.sleep(0.2)


def chat(*parts: Any, **fields: Any) -> dict[str, Any]:
    content = [part if isinstance(part, dict) else {"type": "text", "text": part} for part in parts]
    base = {"model": "policy", "messages": [{"role": "user", "content": content}], "temperature": 0}
    return {**base, "extra_body": {"ignore_eos": True}, **fields}


def picture(colour: Any, size: tuple[int, int] = (56, 56)) -> str:
    out = io.BytesIO()
    Image.new("RGB", size, colour).save(out, "PNG")
    return "data:image/png;base64," + base64.b64encode(out.getvalue()).decode()


def shown(colour: Any) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": picture(colour)}}


def clip() -> str:
    """A lossless clip; an animation, since GPU machines may lack video encoders."""
    first, *rest = [Image.new("RGB", (56, 56), (shade,) * 3) for shade in range(0, 240, 20)]
    out = io.BytesIO()
    first.save(out, "PNG", save_all=True, append_images=rest, duration=250)
    return "data:image/apng;base64," + base64.b64encode(out.getvalue()).decode()


def extra(model: Any) -> dict[str, Any]:
    fields: dict[str, Any] = model.model_extra or {}
    return fields


async def test_every_dialect_says_the_same_whole_streamed_sync_and_async(stack: Stack) -> None:
    async with stack.client() as client:
        for seed in range(3, 33):
            asked = chat("what colour is this?", shown("red"), n=2, seed=seed, temperature=1, logprobs=True)
            whole = await client.chat.completions.create(**asked)
            if whole.usage and whole.usage.completion_tokens == 12:
                break  # a placeholder that the model writes would end a reply early
        texts = [choice.message.content for choice in whole.choices]
        assert whole.usage and whole.usage.completion_tokens == 12
        logprobs = whole.choices[0].logprobs
        assert logprobs and len(logprobs.content or ()) == 6
        assert all(entry.logprob <= 0 for entry in logprobs.content or ())
        pieces, usage = ["", ""], None
        options: Any = {"include_usage": True}
        async for chunk in await client.chat.completions.create(**asked, stream=True, stream_options=options):
            usage = chunk.usage or usage
            for choice in chunk.choices:
                pieces[choice.index] += choice.delta.content or ""
        assert pieces == texts and usage and usage.completion_tokens == 12

        greedy = await client.chat.completions.create(**chat("hello"))
        prompt = "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
        plain: Any = {"model": "policy", "temperature": 0, "extra_body": {"ignore_eos": True}}
        completion = await client.completions.create(prompt=prompt, max_tokens=6, logprobs=0, **plain)
        response = await client.responses.create(input="hello", **plain)
        said = greedy.choices[0].message.content
        assert said == completion.choices[0].text == response.output_text
        async with client.responses.stream(input="hello", **plain) as stream:
            deltas = "".join([e.delta async for e in stream if e.type == "response.output_text.delta"])
        assert deltas == said

        secret = stack.secret(Scope.ENV)
        with openai.OpenAI(base_url=stack.url, api_key=secret, timeout=120, max_retries=0) as sync:

            def ask() -> list[Any]:
                chunks = sync.chat.completions.create(**chat("hello"), stream=True)
                streamed = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
                texts = sync.completions.create(prompt=prompt, max_tokens=6, **plain).choices[0].text
                return [streamed, texts, sync.responses.create(input="hello", **plain).output_text]

            assert await asyncio.to_thread(ask) == [said] * 3


async def test_pictures_and_clips_change_the_reply_and_their_tokens_are_scored_as_sampled(
    stack: Stack,
) -> None:
    full: Any = {"x-omnifleet-provenance": "full"}
    clips = {"type": "video_url", "video_url": {"url": clip()}}
    async with (
        stack.client() as client,
        RolloutClient.open(stack.address, stack.secret(Scope.TRAINER)) as rollout,
    ):
        seen = []
        for part in (shown("red"), shown("navy"), clips):
            asked = chat(part, "what?", logprobs=True)
            reply = await client.chat.completions.create(**asked, extra_headers=full)
            origin, message = extra(reply)["omnifleet"], extra(reply.choices[0].message)
            [media] = origin["media"]
            assert origin["engine"].startswith("vllm ") and len(media["processor_fingerprint"]) == 64
            assert origin["prompt_hash"] and origin["sampling"]["max_tokens"] == 6
            rendered = await rollout.render(asked["messages"], identity=Identity("default"))
            scored, _ = await rollout.score_tokens(
                rendered.token_ids, message["generation_token_ids"], rendered.media
            )
            apart = np.abs(np.array(scored) - np.array(message["generation_log_probs"])).max()
            assert apart < stack.device.tolerance
            assert len(message["prompt_token_ids"]) > len(rendered.token_ids)  # expanded
            seen.append((media["kind"], message["generation_log_probs"]))
        assert [kind for kind, _ in seen] == ["image", "image", "video"]
        assert np.abs(np.array(seen[0][1]) - np.array(seen[1][1])).max() > 1e-4
        items: Any = [{"type": "input_video", "video_url": clip()}, {"type": "input_text", "text": "what?"}]
        answer = await client.responses.create(
            model="policy",
            input=[{"role": "user", "content": items}],
            temperature=0,
            extra_body={"ignore_eos": True, "return_token_ids": True},
        )
        again = extra(answer.output[-1])["generation_log_probs"]
        assert np.allclose(again, seen[2][1], atol=stack.device.tolerance)


async def test_thirty_turns_with_pictures_keep_one_growing_exact_token_prefix(stack: Stack) -> None:
    async with stack.client() as client:
        session: Any = {"x-omnifleet-session": "thirty"}
        messages: list[Any] = []
        known: list[int] = []
        cached = 0
        marks = set(Renderer.load(stack.model).placeholders.values())
        for turn in range(30):
            messages.append(
                {
                    "role": "user",
                    "content": [shown((8 * turn, 0, 99)), {"type": "text", "text": f"turn {turn}"}],
                }
            )
            for seed in range(turn, 3000, 100):
                reply = await client.chat.completions.create(
                    model="policy",
                    messages=messages,
                    seed=seed,
                    max_tokens=4,
                    extra_headers=session,
                    extra_body={"return_token_ids": True},
                )
                message = reply.choices[0].message
                fields = extra(message)
                if not marks.intersection(fields["generation_token_ids"]):
                    break  # nothing can follow a picture that the model only claims to show
            prompt = fields["prompt_token_ids"]
            assert prompt[: len(known)] == known and len(prompt) > len(known)
            known = [*prompt, *fields["generation_token_ids"]]
            details = reply.usage and reply.usage.prompt_tokens_details
            cached = max(cached, (details and details.cached_tokens) or 0)
            messages.append(
                {"role": "assistant", "content": message.content}
            )  # text only: the session has the ids
        assert cached > len(known) // 2  # what was said before was not computed again


async def test_the_context_caps_the_reply_and_refuses_a_prompt_that_does_not_fit(stack: Stack) -> None:
    async with stack.client() as client:
        long = "~" * (LIMIT - 26)  # one token a character
        reply = await client.chat.completions.create(**chat(shown("red"), long, max_tokens=5000))
        assert reply.choices[0].finish_reason == "length"
        assert reply.usage and reply.usage.total_tokens == LIMIT and reply.usage.completion_tokens < 26
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**chat(shown("red"), long + "~" * 100))
        assert caught.value.code == "prompt_too_long"
        with pytest.raises(openai.BadRequestError, match="placeholder"):
            await client.chat.completions.create(**chat(shown("red"), "<|image_pad|>"))
        lost = {"type": "image_url", "image_url": {"url": "media://" + "0" * 64}}
        with pytest.raises(openai.NotFoundError):
            await client.chat.completions.create(**chat(lost))


async def test_stop_strings_tools_and_versions_meet_a_real_engine(stack: Stack) -> None:
    async with stack.client() as client:
        free = (
            (await client.chat.completions.create(**chat("hello", max_tokens=12))).choices[0].message.content
        )
        assert free
        stop = free[len(free) // 2 :][:2]
        cut = (await client.chat.completions.create(**chat("hello", max_tokens=12, stop=stop))).choices[0]
        assert cut.message.content == free[: free.index(stop)] and cut.finish_reason == "stop"
        reply = await client.chat.completions.create(**chat("hello", tools=TOOLS))
        assert not reply.choices[0].message.tool_calls and reply.choices[0].message.content
        late: Any = {"x-omnifleet-weight-version": "min=nobody/x:9", "x-omnifleet-timeout-s": "0.5"}
        with pytest.raises(openai.APIStatusError) as caught:
            await client.chat.completions.create(**chat("hello"), extra_headers=late)
        assert caught.value.status_code == 503 and caught.value.code == "version_too_old"


@contextlib.asynccontextmanager
async def scripted(stack: Stack) -> AsyncIterator[ScriptedWorker]:
    """A worker of another pool, which serves the run `tools`."""
    worker = ScriptedWorker("scripted", WeightVersion("tools", "a", 1))

    def register(server: Any) -> None:
        rollout_pb2_grpc.add_RolloutServicer_to_server(worker, server)  # type: ignore[no-untyped-call]

    async with (
        serving("127.0.0.1:0", register, tokens=load_tokens(stack.run_dir), knob="listen") as address,
        FleetClient.open(stack.address, stack.secret(Scope.SERVICE)) as fleet,
        FleetClient.open(stack.address, stack.secret(Scope.OPERATOR)) as operator,
    ):
        await operator.assign("scripted", "tools")
        view = WorkerView(
            id="scripted",
            instance="scripted",
            pool="scripted",
            grpc_address=address,
            model="scripted",
            state=WorkerState.CATCHING_UP,
            version=worker.version,
            max_running=4,
        )
        lease = await fleet.join(view)
        yield worker
        await fleet.leave(lease.lease_id, "done")


async def test_tool_calls_and_reasoning_through_vllms_own_parsers(stack: Stack) -> None:
    tokenizer = Renderer.load(stack.model)
    end = next(iter(tokenizer.eos))
    call = f'<tool_call>{{"name": "look", "arguments": {ARGUMENTS}}}</tool_call>'
    think: Any = {"chat_template_kwargs": {"thinking": True}}
    async with scripted(stack) as worker, stack.client() as client:
        to: Any = {"x-omnifleet-run": "tools", "x-omnifleet-session": "s"}
        said = [*tokenizer.encode(f"<think>it is near the wall</think>let me see{call}"), end]
        asked: Any = {"model": "policy", "messages": [{"role": "user", "content": "where?"}], "tools": TOOLS}
        worker.replies += [said, said]
        reply = await client.chat.completions.create(**asked, extra_headers=to, extra_body=think)
        message = reply.choices[0].message
        assert reply.choices[0].finish_reason == "tool_calls" and message.content == "let me see"
        assert extra(message)["reasoning_content"] == "it is near the wall"
        [tool] = message.tool_calls or []
        assert tool.type == "function"
        assert (tool.function.name, tool.function.arguments) == ("look", ARGUMENTS)

        parts: dict[str, Any] = {}
        async for chunk in await client.chat.completions.create(
            **asked, extra_headers=to, extra_body=think, stream=True
        ):
            for choice in chunk.choices:
                parts |= choice.delta.model_dump(exclude_none=True)
                parts["finish"] = choice.finish_reason or parts.get("finish")
        assert parts["content"] == "let me see" and parts["finish"] == "tool_calls"
        assert parts["tool_calls"][0]["function"]["arguments"] == ARGUMENTS

        # TOK-05: the client writes the call anew; the next prompt has the sampled ids, the reasoning's too.
        before = list(worker.requests[-1].tokens.token_ids)
        worker.replies += [tokenizer.encode("a wall")]
        again = json.dumps(json.loads(tool.function.arguments), sort_keys=True)
        result = {"role": "tool", "tool_call_id": tool.id, "content": "bricks"}
        function = {"name": "look", "arguments": again}
        history = [
            *asked["messages"],
            {
                "role": "assistant",
                "content": message.content,
                "tool_calls": [{"id": tool.id, "type": "function", "function": function}],
            },
            result,
        ]
        final = await client.chat.completions.create(
            model="policy", messages=history, tools=TOOLS, extra_headers=to
        )
        assert final.choices[0].message.content == "a wall"
        prompt = list(worker.requests[-1].tokens.token_ids)
        assert prompt[: len(before) + len(said)] == [*before, *said]

        # API-09: a stop string inside the reasoning ends it there, and shows nowhere.
        worker.replies += [tokenizer.encode("<think>by the river")]
        stopped = await client.responses.create(
            model="policy", input="where?", extra_headers=to, extra_body={**think, "stop": "river"}
        )
        [reasoning, answer] = stopped.output
        assert reasoning.type == "reasoning" and answer.type == "message"
        assert reasoning.content and reasoning.content[0].text == "by the "
        assert stopped.output_text == ""
