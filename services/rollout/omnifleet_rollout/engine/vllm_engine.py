"""The adapter on vLLM's AsyncLLM, releases as in `vllm_compat`, CPU and CUDA builds: its life, its gate, its weights.

Every wait on the engine's process has a deadline; what runs into one is a typed error.
"""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any, TypeVar

from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import InFlight, MediaRef, Sampling
from omnifleet.wire.needs import NeedsBody, needs_digest
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.checkpoint import read_config, read_table
from omnifleet_rollout.engine.port import (
    EXTRAS,
    EngineDelta,
    EngineFacts,
    EnginePrompt,
    EngineRequest,
    EngineStats,
)
from omnifleet_rollout.engine.vllm_compat import check, look
from omnifleet_rollout.engine.vllm_generation import Generation
from omnifleet_rollout.engine.vllm_launch import launch, set_environment, vllm_version
from omnifleet_rollout.engine.vllm_media import PromptMedia
from omnifleet_rollout.refit.door import ask_for_tensors, knock_all

log = logging.getLogger("omnifleet.rollout.engine")
Result = TypeVar("Result")
_RPC_S = 300.0
_PAUSE_S = 60.0
"""A step of the engine, and what waits for it: a pause is done after the step that runs."""
_COUNTERS_EVERY_S = 1.0
_TURNS = 50


class VllmEngine:
    """Implements `Engine`. `find_media`: address of the media service, asked at the first media item."""

    def __init__(
        self, model: Path, config: RolloutConfig, *, find_media: Callable[[], Awaitable[str]], secret: str
    ) -> None:
        self._model, self._config = model, config
        self._architecture = str((read_config(model).get("architectures") or ["unknown"])[0])
        self._table = read_table(model)
        self._media = PromptMedia(
            model, self._architecture, config.engine, find_media=find_media, secret=secret
        )
        self._llm: Any = None
        self._stuck = ""
        self._asleep: list[str] = []
        """Kinds of memory that are given up."""
        self._doors: list[str] = []
        self._needs = ""
        self._stats = EngineStats()
        self._counters: dict[str, float] = {"encoder_items": 0.0}
        self._polling: asyncio.Task[None] | None = None
        self._facts: EngineFacts | None = None

    @property
    def facts(self) -> EngineFacts:
        """What does not change while the engine lives. See `Engine.facts`."""
        assert self._facts is not None, "start the engine first"
        return self._facts

    # ------------------------------------------------------------------ life

    async def start(self) -> None:
        """Load and be ready. See `Engine.start`."""
        set_environment(self._config.engine)
        self._compat = check(vllm_version(), look())
        self._encoder_sees_language = self._architecture in seams.LANGUAGE_IN_ENCODER
        try:
            self._llm = launch(self._model, self._config, self._compat, self._on_stats)
        except (RuntimeError, ValueError, OSError, ImportError, AssertionError, TypeError) as error:
            raise OmnifleetError(
                Reason.ENGINE_ERROR, f"vLLM could not load {self._model}: {error}", knob="rollout.engine"
            ) from error
        seams.check_front(self._llm, media=self._media.takes_any, sounds=self._media.takes_sounds)
        self._generation = Generation(self._llm, self._media, self._config.engine, self._compat)
        ranks = await self._rpc_all("omni_ready")
        self._doors = [str(rank["door"]) for rank in ranks]
        self._needs = needs_digest([str(rank["needs"]) for rank in ranks])
        await self._within(_RPC_S, self._warm_up(), "generate its first token")
        engine = self._config.engine
        self._facts = EngineFacts(
            info=f"vllm {vllm_version()}",
            model=str(self._model),
            logprobs_mode=self._config.logprobs_mode,
            max_model_len=engine.max_model_len,
            max_num_seqs=engine.max_num_seqs,
            tensors=self._table,
            transports=tuple(ranks[0]["transports"]),
            ranks=len(ranks),
            extras=tuple(name for name in EXTRAS if getattr(engine, f"return_{name}")),
            sparse=all(rank["sparse"] for rank in ranks),
        )
        self._polling = asyncio.create_task(self._poll_counters())

    async def _warm_up(self) -> None:
        """One token: the first step compiles and loads what no caller should wait for."""
        request = EngineRequest(
            "warm-up", EnginePrompt([0]), Sampling(max_tokens=1, ignore_eos=True), salt="warm-up"
        )
        async with aclosing(self.generate(request)) as deltas:
            async for _ in deltas:
                continue

    async def shutdown(self) -> None:
        """End everything. Idempotent. See `Engine.shutdown`."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._media.close()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it reports the death that we are about to cause
            await asyncio.to_thread(llm.shutdown, 2.0)

    def alive(self) -> bool:
        """False once dead. See `Engine.alive`."""
        return self._llm is not None and not self._llm.errored and not self._stuck

    def stats(self) -> EngineStats:
        """Load of now. See `Engine.stats`."""
        stats = self._stats
        return EngineStats(
            stats.running, stats.waiting, stats.kv_usage, {**self._counters, **self._media.counters}
        )

    def _on_stats(self, running: int, waiting: int, kv_usage: float) -> None:
        self._stats = EngineStats(running, waiting, kv_usage)

    async def _poll_counters(self) -> None:
        while True:
            await asyncio.sleep(_COUNTERS_EVERY_S)
            await self.refresh()

    async def refresh(self) -> None:
        """Bring counters up to date. See `Engine.refresh`."""
        try:
            self._counters.update(await self._rpc("omni_counters"))
        except OmnifleetError as error:
            log.debug("no counters: %s", error.message)

    # ------------------------------------------------------------------ requests

    async def prepare(self, token_ids: Sequence[int], media: Sequence[MediaRef], run: str) -> EnginePrompt:
        """Expand placeholders and find the media. See `Engine.prepare`."""
        return await self._media.prepare(token_ids, media, run)

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Deltas of one sample. See `Engine.generate`."""
        return self._generation.stream(request)

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now. See `Engine.abort`."""
        if ids and self._llm is not None:
            await self._llm.abort(list(ids))

    async def score(self, prompt: EnginePrompt, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of given tokens. See `Engine.score`."""
        return await self._generation.score(prompt, token_ids)

    # ------------------------------------------------------------------ weights

    async def pause(self) -> None:
        """Freeze at a token boundary. See `Engine.pause`."""
        # `pause_generation` is this call and a fixed sleep of 20 ms, a third of the gate.
        core = getattr(self._llm.engine_core, "pause_scheduler_async", None)
        pause = core or self._llm.pause_generation
        await self._within(_PAUSE_S, pause(mode="keep", clear_cache=False), "pause")
        # Tokens of the last step are on their way through the front end's tasks, and some are held back. Where the engine does
        # not label tokens, we do at receipt: each hand-over is one turn of the loop.
        await _turns()
        seams.hand_over(self._llm)
        await _turns()

    async def resume(self) -> None:
        """Go on. See `Engine.resume`."""
        if self._llm is not None:
            await self._or_give_up(_PAUSE_S, self._llm.resume_generation(), "resume")

    async def sleep(self, level: int) -> None:
        """Give device memory up. See `Engine.sleep`. The CPU build only pauses and drops its caches."""
        if level == 0:
            await self.pause()
            return
        if not self._config.sleep_level:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                "this engine was not started to give its memory up",
                knob="rollout.sleep_level",
            )
        await self._or_give_up(_RPC_S, self._llm.sleep(level), "fall asleep")
        self._asleep = ["weights", "kv_cache"]

    async def wake(self, *, weights_only: bool) -> None:
        """Take it back. See `Engine.wake`."""
        tags = [tag for tag in self._asleep if tag == "weights" or not weights_only]
        if tags:
            await self._or_give_up(_RPC_S, self._llm.wake_up(tags), "wake up")
            self._asleep = [tag for tag in self._asleep if tag not in tags]
        elif not weights_only:
            await self.resume()

    async def _or_give_up(self, limit_s: float, step: Awaitable[Any], what: str) -> None:
        """`step`; an engine that does not get there in time, or fails, is not `alive` any more. Raises ENGINE_ERROR."""
        from vllm.v1.engine.exceptions import EngineDeadError

        try:
            await self._within(limit_s, step, what)
        except (OmnifleetError, EngineDeadError, RuntimeError) as error:
            self._stuck = str(error)
            log.error("given up: %s", error)
            if isinstance(error, OmnifleetError):
                raise
            raise retryable(Reason.ENGINE_ERROR, f"vLLM could not {what}: {error}") from error

    async def _within(self, limit_s: float, step: Awaitable[Result], what: str) -> Result:
        """`step`, bounded in time. Raises ENGINE_ERROR, retryable, at the deadline."""
        try:
            async with asyncio.timeout(limit_s):
                return await step
        except TimeoutError:
            raise retryable(Reason.ENGINE_ERROR, f"vLLM did not {what} within {limit_s:.0f} s") from None

    async def stage(self, manifest_json: str, source: str, *, in_place: bool = False) -> int:
        """Receive, verify, keep in the shadow, beside the engine's steps. See `Engine.stage`."""
        return await knock_all(self._doors, manifest_json, source, in_place=in_place)

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        """Load the shadow. See `Engine.commit`."""
        ranks = await self._rpc_all("omni_commit", manifest_digest)
        self._needs = needs_digest([str(rank["needs"]) for rank in ranks])
        # Kept requests go on with the KV they have, by policy. New ones never see it: their salt names the new version.
        if policy is not InFlight.KEEP:
            reset = self._llm.reset_prefix_cache(reset_running_requests=True)
            if not await self._within(_PAUSE_S, reset, "reset its prefix cache"):
                raise OmnifleetError(Reason.ENGINE_ERROR, "vLLM kept KV blocks of the old weights")
        if encoder_changed or self._encoder_sees_language:
            await self._within(_PAUSE_S, self._llm.reset_encoder_cache(), "reset its encoder cache")
        if self._compat.labels:
            await self._within(_PAUSE_S, self._llm.update_weight_version(label), "take the version")
        return int(ranks[0]["tensors"])

    async def drop_stage(self) -> None:
        """Forget the shadow. See `Engine.drop_stage`."""
        await self._rpc("omni_drop")

    def needs(self) -> str:
        """As of the last commit. See `Engine.needs`."""
        return self._needs

    async def read_needs(self) -> list[NeedsBody]:
        """Between two steps. See `Engine.read_needs`."""
        return await self._rpc_all("omni_needs") if self._needs else []

    async def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> None:
        """Write source tensors. See `Engine.export`."""
        await ask_for_tensors(self._doors[0], path, tensors)

    async def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        """Call the extension; all ranks must agree. A refusal keeps its reason, anything else is ENGINE_ERROR."""
        return (await self._rpc_all(method, *args))[0]

    async def _rpc_all(self, method: str, *args: str) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        if self._llm is None:
            raise retryable(Reason.WORKER_LOST, "the engine is shut down")
        try:
            call = self._llm.collective_rpc(method, timeout=_RPC_S, args=args)
            answers = await self._within(_RPC_S, call, f"answer {method}")
        except OmnifleetError:
            raise
        except Exception as error:
            raise OmnifleetError(Reason.ENGINE_ERROR, f"{method} failed in vLLM: {error}") from error
        bodies = [json.loads(answer) for answer in answers]
        for body in bodies:
            if "reason" in body:
                raise OmnifleetError(Reason(body["reason"]), body["message"], knob=body["knob"])
        return [body["ok"] for body in bodies]


async def _turns() -> None:
    for _ in range(_TURNS):
        await asyncio.sleep(0)
