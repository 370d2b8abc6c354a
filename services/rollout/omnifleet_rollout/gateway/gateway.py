"""The gateway behind its two doors (gRPC, HTTP): renders, dispatches, answers for itself."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import aclosing
from pathlib import Path
from typing import Any

import omnifleet
from omnifleet.client.rollout import Rendered
from omnifleet.config.recipe import SamplingConfig
from omnifleet.config.services import GatewayConfig
from omnifleet.errors import invalid
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WorkerState
from omnifleet.wire import common_pb2, rollout_pb2
from omnifleet.wire.codec import counters_to_wire, identity_from_wire, media_to_wire
from omnifleet.wire.server import INSTANCE
from omnifleet_rollout.fleet.service import Fleet
from omnifleet_rollout.gateway.conversation import ChatPrompt, Conversations
from omnifleet_rollout.gateway.dispatch import Dispatcher
from omnifleet_rollout.gateway.links import Links
from omnifleet_rollout.gateway.origins import Origins
from omnifleet_rollout.gateway.parsing import ParsersLoader
from omnifleet_rollout.gateway.parts import PutMedia
from omnifleet_rollout.gateway.progress import Decode
from omnifleet_rollout.gateway.renderer import RendererLoader
from omnifleet_rollout.gateway.routing import Router
from omnifleet_rollout.gateway.session_key import SessionKeys
from omnifleet_rollout.gateway.sessions import Sessions

MODEL = "policy"
"""What a chat request may always call the model that is served."""
_NO_DEADLINE_S = 1e7  # gRPC answers with a huge number where the caller set none


class Gateway:
    """One process's state. `defaults`: the recipe's sampling, for chat requests that name none."""

    def __init__(
        self,
        config: GatewayConfig,
        fleet: Fleet,
        *,
        worker_secret: str,
        renderer: RendererLoader,
        put_media: PutMedia,
        sessions: Sessions,
        model_path: Path | None = None,
        defaults: SamplingConfig | None = None,
    ) -> None:
        self.config, self.fleet, self.renderer = config, fleet, renderer
        self.defaults = defaults or SamplingConfig()
        self.counters = Counters("gateway")
        self.parsers = ParsersLoader(config, renderer)
        self.conversations = Conversations(renderer, put_media, sessions, config.request_timeout_s)
        self.origins = Origins()
        self.session_keys = SessionKeys(worker_secret)
        self._model_path = model_path
        self._links = Links(worker_secret)
        self._began = time.monotonic()
        router = Router(
            queue_per_worker=config.queue_per_worker, queue_per_run=config.queue_per_run, homes=sessions
        )
        self.dispatcher = Dispatcher(
            fleet,
            router,
            self._links,
            self.counters,
            attempts=config.attempts,
            eos=self._eos,
            decode=self._decode,
        )
        self.counters.gauge("queue_depth", self._queue_depth)
        self.counters.gauge("requests_in_flight", lambda: float(self.dispatcher.requests))
        self.counters.gauge("workers_ready", lambda: float(self._states()[WorkerState.READY]))

    def deadline(self, timeout_s: float | None) -> float:
        """Event loop time by which a request must end; leaves the caller time to read why it did not."""
        limit = self.config.request_timeout_s
        asked = timeout_s if timeout_s is not None and timeout_s < _NO_DEADLINE_S else limit
        return asyncio.get_running_loop().time() + asked - min(0.25, asked / 10)

    async def generate(
        self, request: rollout_pb2.GenerateRequest, timeout_s: float | None = None
    ) -> AsyncGenerator[list[rollout_pb2.GenerateEvent], None]:
        """Events of a request, those together that are ready together; a chat prompt is rendered first.

        Raises OmnifleetError for refusals.
        """
        deadline = self.deadline(timeout_s)
        if request.WhichOneof("prompt") == "chat":
            if request.media:
                raise invalid("a chat prompt carries its media in its messages, not beside them")
            rendered = await self.render(request.chat, request.identity)
            request.tokens.CopyFrom(rollout_pb2.TokenPrompt(token_ids=rendered.token_ids))
            request.media.extend(media_to_wire(ref) for ref in rendered.media)
        async with aclosing(self.dispatcher.generate(request, deadline)) as batches:
            async for events in batches:
                yield events

    async def render(self, chat: rollout_pb2.ChatPrompt, who: common_pb2.Identity) -> Rendered:
        """Messages as exact tokens. Raises INVALID_REQUEST, INVALID_MEDIA, MODEL_MISSING, HISTORY_CHANGED."""
        try:
            messages = json.loads(chat.messages_json)
            tools = json.loads(chat.tools_json) if chat.tools_json else []
            kwargs = json.loads(chat.template_kwargs_json) if chat.template_kwargs_json else {}
        except ValueError as error:
            raise invalid(f"the chat prompt is not JSON: {error}") from error
        if not isinstance(kwargs, dict) or not isinstance(tools, list):
            raise invalid("template_kwargs must be an object and tools a list")
        prompt = ChatPrompt(messages, tools, kwargs, chat.required_prefix_token_ids)
        return (await self.conversations.open(prompt, identity_from_wire(who))).rendered

    async def run(self) -> None:
        """Background work until cancelled. Ends only by an error."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.fleet.look())
            tasks.create_task(self.dispatcher.follow())

    async def close(self) -> None:
        """Close connections to workers."""
        await self._links.close()

    @property
    def ready(self) -> bool:
        """True if a request would find a worker now."""
        return self._states()[WorkerState.READY] > 0 and self.renderer.settled and self.parsers.settled

    def models(self) -> list[str]:
        """Names that a chat request may give as `model`; the first is the canonical one."""
        paths = [str(self._model_path)] if self._model_path else []
        paths += [w.model for w in self.fleet.registry.workers() if w.model]
        names = [name for path in paths for name in (Path(path).name, path)]
        return [*dict.fromkeys([MODEL, *names])]

    def status(self) -> common_pb2.ServiceStatus:
        """Counters, and facts: workers by state, target version, desired, each worker's load, each run's account."""
        view = self.fleet.view()
        facts = {
            "workers": ", ".join(f"{n} {state}" for state, n in sorted(self._states().items())) or "none",
            "desired": str(view.desired),
            "target_version": str(view.target_version or "none"),
            "revision": str(view.revision),
            "queue_depth": str(int(self._queue_depth())),
            "renderer": "ready" if self.renderer.now else "none" if self.renderer.settled else "loading",
        }
        for worker in view.workers:
            load = f"{self.dispatcher.load(worker)}/{worker.max_running}"
            facts[f"worker {worker.id}"] = f"{worker.state} {worker.version or 'no version'} load {load}"
        for run, account in self.dispatcher.accounts.runs.items():
            facts[f"run {run or 'default'}"] = ", ".join(f"{n} {what}" for what, n in sorted(account.items()))
        return common_pb2.ServiceStatus(
            service="gateway",
            version=omnifleet.__version__,
            instance=INSTANCE,
            uptime_s=time.monotonic() - self._began,
            state="draining" if self.fleet.closed else "serving",
            counters=counters_to_wire(self.counters.snapshot()),
            facts=facts,
        )

    def fleet_json(self) -> dict[str, Any]:
        """The operator's view."""
        view = self.fleet.view(include_gone=False)
        workers = [
            {
                "id": w.id,
                "pool": w.pool,
                "state": str(w.state),
                "note": w.note,
                "version": str(w.version) if w.version else None,
                "pinned": w.pinned,
                "samples": self.dispatcher.load(w),
                "running": w.running,
                "waiting": w.waiting,
                "max_running": w.max_running,
                "kv_usage": w.kv_usage,
                "tokens_per_s": w.tokens_per_s,
                "heartbeat_unix_ms": w.heartbeat_unix_ms,
                "grpc_address": w.grpc_address,
                "model": w.model,
                "engine": w.engine,
                "pid": w.pid,
            }
            for w in view.workers
        ]
        return {
            "workers": workers,
            "desired": view.desired,
            "target_version": str(view.target_version) if view.target_version else None,
            "revision": view.revision,
            "queue_depth": int(self._queue_depth()),
            "runs": {run: dict(account) for run, account in self.dispatcher.accounts.runs.items()},
        }

    def _states(self) -> Counter[WorkerState]:
        return Counter(w.state for w in self.fleet.registry.workers())

    def _queue_depth(self) -> float:
        """Samples without a slot: those without a worker, and those beyond what workers run at once."""
        over = (max(0, self.dispatcher.load(w) - w.max_running) for w in self.fleet.registry.workers())
        return float(self.dispatcher.waiting + sum(over))

    def _eos(self) -> frozenset[int]:
        renderer = self.renderer.now
        return renderer.eos if renderer else frozenset()

    def _decode(self) -> Decode | None:
        renderer = self.renderer.now
        return renderer.decode if renderer else None
