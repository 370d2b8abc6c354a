"""A gateway over real gRPC and HTTP with scripted workers in the same process; only the engines are missing."""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any
from unittest.mock import patch

from blake3 import blake3
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from omnifleet.address import token_digest
from omnifleet.auth import OPEN, Scope, Tokens
from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.rollout import RolloutClient
from omnifleet.config.services import GatewayConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.http import http_serving
from omnifleet.types import Digest, Identity, MediaKind, MediaRef, VersionSpan, WeightVersion, WorkerState
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.codec import bound_from_wire, spans_from_wire, spans_to_wire, version_to_wire
from omnifleet.wire.server import serving
from omnifleet_rollout.fleet.registry import Registry
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.fleet.store import FleetStore
from omnifleet_rollout.gateway import calls
from omnifleet_rollout.gateway.gateway import Gateway
from omnifleet_rollout.gateway.http import make_gateway_app
from omnifleet_rollout.gateway.parts import PutMedia
from omnifleet_rollout.gateway.renderer import Renderer, RendererLoader
from omnifleet_rollout.gateway.server import register
from omnifleet_rollout.gateway.sessions import Sessions

WHO = Identity(run="test")
PROMPT = [10, 11, 12]
PICTURE_BYTES = b"any bytes: the media service decodes"
PICTURE = MediaRef(MediaKind.IMAGE, Digest("ab" * 32))


def v(number: int) -> WeightVersion:
    """Version `number` of the one lineage of these tests."""
    return WeightVersion("test", "a", number)


def token(seed: int, position: int) -> int:
    """What scripted workers say: a function of seed and position, 40..89 (letters under the test tokenizer)."""
    return 40 + (seed * 31 + position * 7) % 50


TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{% if p.type == 'image' %}<|image_pad|>{% elif p.type == 'video' %}<|video_pad|>"
    "{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|im_start|>", "<|im_end|>", "<|image_pad|>", "<|video_pad|>")
IM_END = 257


def write_tokenizer(folder: Path, merges: Sequence[tuple[str, str]] = ()) -> Path:
    """A checkpoint folder without weights: one token a byte, then SPECIAL from 256 on, then merges; a chat template."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i for i, letter in enumerate(letters)}
    vocabulary |= {name: 256 + i for i, name in enumerate(SPECIAL)}
    vocabulary |= {left + right: 260 + i for i, (left, right) in enumerate(merges)}
    tokenizer = Tokenizer(models.BPE(vocabulary, list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in SPECIAL])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    config = {"model_type": "qwen2_vl", "image_token_id": 258, "video_token_id": 259}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, 7]}))
    Renderer.load(folder)  # imports the library here, not inside the first test's time limit
    return folder


class ScriptedWorker(rollout_pb2_grpc.RolloutServicer):
    """Speaks the worker's side of the contract. `go`: one permit a token; `refuse`: raised before the first event.

    replies: token ids of the next replies, which end with `stop`; without one, `token` until max_tokens.
    """

    def __init__(
        self, id: str, version: WeightVersion, *, max_running: int = 4, paused: bool = False
    ) -> None:
        self.id, self.version, self.max_running = id, version, max_running
        self.go = asyncio.Semaphore(0 if paused else 1 << 30)
        self.refuse: list[OmnifleetError] = []
        self.fail_at: dict[int, OmnifleetError] = {}
        self.replies: list[Sequence[int]] = []
        self.requests: list[rollout_pb2.GenerateRequest] = []
        self.said = asyncio.Event()
        self.cancelled = asyncio.Event()
        self.running = self.at_once = 0
        self.address = ""

    async def Generate(self, request: rollout_pb2.GenerateRequest, context: Any) -> AsyncIterator[Any]:
        self.requests.append(request)
        self.running += 1
        try:
            async for event in self._reply(request):
                yield event
                self.said.set()
        except (asyncio.CancelledError, GeneratorExit):
            self.cancelled.set()
            raise
        finally:
            self.running -= 1

    async def GenerateAtOnce(self, request: rollout_pb2.GenerateRequest, context: Any) -> Any:
        self.at_once += 1
        events = [event async for event in self.Generate(request, context)]
        return rollout_pb2.GenerateEvent(batch=rollout_pb2.EventBatch(events=events))

    async def _reply(self, request: rollout_pb2.GenerateRequest) -> AsyncIterator[Any]:
        assert request.sampling.n == 1 and request.WhichOneof("prompt") == "tokens"
        if self.refuse:
            raise self.refuse.pop(0)
        bound = bound_from_wire(request.weight_version)
        if not bound.admits(self.version):
            raise OmnifleetError(
                Reason.VERSION_TOO_OLD, "behind", retryable=True, current_version=self.version
            )
        script = self.replies.pop(0) if self.replies else None
        ids = request.tokens.token_ids
        echo = rollout_pb2.PromptEcho(
            prompt_hash=token_digest(ids),
            token_ids=ids if request.return_prompt_token_ids else (),
            prompt_tokens=len(ids),
            worker=self.id,
            logprobs_mode="processed",
            media=request.media,
            engine="scripted 1",
            processor_fingerprints=["f" * 64 for _ in request.media],
            max_tokens=request.sampling.max_tokens,
        )
        yield rollout_pb2.GenerateEvent(prompt=echo)
        spans = spans_from_wire(request.continuation.spans)
        end = request.sampling.max_tokens if script is None else len(script)
        for position in range(len(request.continuation.token_ids), end):
            await self.go.acquire()
            if position in self.fail_at:
                raise self.fail_at.pop(position)
            span = VersionSpan(self.version, position, position + 1, self.id)
            spans.append(span)
            chunk = rollout_pb2.TokenChunk(
                token_ids=[token(request.sampling.seed, position) if script is None else script[position]],
                logprobs=[-0.5],
                spans=spans_to_wire([span]),
            )
            yield rollout_pb2.GenerateEvent(chunk=chunk)
        reason = "length" if script is None else "stop"
        done = rollout_pb2.Finished(finish_reason=reason, spans=spans_to_wire(spans), tokens=end)
        yield rollout_pb2.GenerateEvent(finished=done)

    async def ScoreTokens(self, request: rollout_pb2.ScoreTokensRequest, context: Any) -> Any:
        if self.refuse:
            raise self.refuse.pop(0)
        return rollout_pb2.ScoreTokensReply(
            logprobs=[-1.0] * len(request.token_ids), version=version_to_wire(self.version)
        )


class World:
    """One gateway and its workers. Heartbeats are sent by the test, so that nothing happens by itself."""

    def __init__(
        self, gateway: Gateway, address: str, http: str, tokens: Tokens, stack: AsyncExitStack
    ) -> None:
        self.gateway, self.address, self.http, self.tokens = gateway, address, http, tokens
        self._stack = stack
        self.fleet: FleetClient
        self.client: RolloutClient
        self.leases: dict[str, str] = {}
        self._stops: dict[str, AsyncExitStack] = {}

    async def worker(
        self, id: str, number: int = 0, *, max_running: int = 4, paused: bool = False
    ) -> ScriptedWorker:
        """Start a worker and let it join at version `number`."""
        worker = ScriptedWorker(id, v(number), max_running=max_running, paused=paused)
        stop = AsyncExitStack()
        self._stack.push_async_callback(stop.aclose)
        self._stops[id] = stop
        worker.address = await stop.enter_async_context(
            serving(
                "127.0.0.1:0",
                lambda server: rollout_pb2_grpc.add_RolloutServicer_to_server(worker, server),  # type: ignore[no-untyped-call]
                tokens=self.tokens,
                knob="listen",
                grace_s=0.0,
            )
        )
        async with FleetClient.open(self.address, self.tokens.secret(Scope.SERVICE)) as fleet:
            self.leases[id] = (await fleet.join(self.report(worker))).lease_id
        return worker

    async def heartbeat(self, worker: ScriptedWorker) -> None:
        """Report now."""
        async with FleetClient.open(self.address, self.tokens.secret(Scope.SERVICE)) as fleet:
            await fleet.heartbeat(self.leases[worker.id], self.report(worker))

    async def kill(self, worker: ScriptedWorker) -> None:
        """End the worker's server at once, as kill -9 would."""
        await self._stops.pop(worker.id).aclose()

    def report(self, worker: ScriptedWorker) -> WorkerView:
        """What the worker says about itself."""
        return WorkerView(
            id=worker.id,
            instance=worker.id,
            grpc_address=worker.address,
            model="scripted",
            state=WorkerState.CATCHING_UP,
            version=worker.version,
            max_running=worker.max_running,
        )


async def put_media(url: str, kind: MediaKind, run: str) -> MediaRef:
    """As a media service without allowed hosts and roots: data URLs only. Equal URLs are equal content."""
    head, comma, payload = url.partition(",")
    if not (head.startswith("data:") and comma):
        raise invalid(f"{url[:40]!r} is not allowed here", reason=Reason.INVALID_MEDIA)
    try:
        data = base64.b64decode(payload, validate=True)
    except binascii.Error as error:
        raise invalid(f"the data URL is not base64: {error}", reason=Reason.INVALID_MEDIA) from error
    return PICTURE if data == PICTURE_BYTES else MediaRef(kind, Digest(blake3(data).hexdigest()))


_PATIENCE_S = 3600.0
"""Scripted workers send no heartbeats of their own, and a loaded machine takes its time."""


@asynccontextmanager
async def world(
    path: Path,
    *,
    tokens: Tokens = OPEN,
    renderer: RendererLoader | None = None,
    put: PutMedia = put_media,
    short_tokens: int = 0,
    **settings: Any,
) -> AsyncIterator[World]:
    """A running gateway without workers. `settings`: of GatewayConfig. short_tokens: longest reply that it asks for at once."""
    config = GatewayConfig(**settings)
    registry = Registry(
        time.monotonic,
        heartbeat_s=config.heartbeat_s,
        suspect_after_s=_PATIENCE_S,
        dead_after_s=2 * _PATIENCE_S,
        max_workers=8,
    )
    store = FleetStore(path / "fleet.sqlite")
    store.load(registry)
    fleet = Fleet(registry, store, look_every_s=0.1)

    sessions = Sessions(path / "sessions.sqlite", keep=config.sessions)

    loader = renderer or RendererLoader(None)
    gateway = Gateway(
        config,
        fleet,
        worker_secret=tokens.secret(Scope.SERVICE),
        renderer=loader,
        put_media=put,
        sessions=sessions,
    )
    loader.start()
    gateway.parsers.start()
    async with AsyncExitStack() as stack:
        stack.enter_context(patch.object(calls, "SHORT_TOKENS", short_tokens))
        stack.callback(store.close)
        stack.callback(sessions.close)
        stack.push_async_callback(gateway.close)
        address = await stack.enter_async_context(
            serving("127.0.0.1:0", lambda s: register(gateway, s), tokens=tokens, knob="listen", grace_s=0.2)
        )
        http = await stack.enter_async_context(
            http_serving(make_gateway_app(gateway, tokens), "127.0.0.1:0", knob="http_listen")
        )
        work = asyncio.create_task(gateway.run())
        here = World(gateway, address, f"http://{http}", tokens, stack)
        here.fleet = await stack.enter_async_context(FleetClient.open(address, tokens.secret(Scope.OPERATOR)))
        here.client = await stack.enter_async_context(
            RolloutClient.open(address, tokens.secret(Scope.TRAINER))
        )
        try:
            yield here
        finally:
            fleet.close()
            gateway.dispatcher.stop()
            work.cancel()
            with suppress(asyncio.CancelledError):
                await work


async def until(condition: Any, timeout_s: float = 10.0) -> None:
    """Wait until `condition()` holds."""
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)
