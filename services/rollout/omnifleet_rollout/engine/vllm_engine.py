"""The adapter on vLLM's AsyncLLM, 0.25.1 to 0.32, CPU and CUDA builds.

Token-in, token-out. Pictures enter as model-ready tensors from the media service with explicit placeholders, so vLLM's
own processor never runs and nothing is expanded twice. A generated media placeholder ends the reply (finish `stop`): it
could not be fed back without its picture. It is never banned on our own account, because a ban changes the distribution
that the trainer must reproduce; `Sampling.banned_token_ids` bans on request.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omnifleet.client.media import MediaClient, Segment
from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.processor import ImageProcessorSpec, image_token_id, read_image_processor
from omnifleet.prompt import expand_placeholders, placeholder_ranges
from omnifleet.types import FinishReason, InFlight, MediaKind, MediaRef, Sampling
from omnifleet_rollout.engine.checkpoint import read_config, read_table
from omnifleet_rollout.engine.port import (
    EngineDelta,
    EngineFacts,
    EnginePrompt,
    EngineRequest,
    EngineStats,
    LabelSpan,
)
from omnifleet_rollout.engine.vllm_launch import launch, set_environment, vllm_version

log = logging.getLogger("omnifleet.rollout.engine")
_RPC_S = 300.0
_FIRST_LOOK_S, _LAST_LOOK_S = 0.002, 0.05
_COUNTERS_EVERY_S = 1.0
_BAN = -100.0
"""vLLM's strongest logit bias: exp(-100) is nothing in float32."""


@dataclass(frozen=True, slots=True)
class Compatibility:
    """What differs between releases. labels: the engine tracks weight versions. send_once: a picture that its process
    lost is reported as a retryable miss, so pixels need not be sent again each time."""

    labels: bool
    send_once: bool

    @staticmethod
    def of(engine_class: type) -> Compatibility:
        """0.32 has all of it, 0.25.1 none."""
        new = hasattr(engine_class, "get_weight_version")
        return Compatibility(labels=new, send_once=new)


@dataclass(frozen=True, slots=True)
class Pictures:
    """Media of one prompt: segments in order, and (offset, length) of each within the expanded ids."""

    segments: list[Segment]
    ranges: list[tuple[int, int]]


class VllmEngine:
    """Implements `Engine`. `find_media`: address of the media service, asked at the first picture."""

    def __init__(
        self, model: Path, config: RolloutConfig, *, find_media: Callable[[], Awaitable[str]], secret: str
    ) -> None:
        self._model, self._config, self._secret = model, config, secret
        self._find_media = find_media
        self._architecture = str((read_config(model).get("architectures") or ["unknown"])[0])
        self._table = read_table(model)
        self._image_token: int | None = None
        self._processor: ImageProcessorSpec | None = None
        self._media: MediaClient | None = None
        self._media_opening = asyncio.Lock()
        self._stack = AsyncExitStack()
        self._llm: Any = None
        self._stats = EngineStats()
        self._counters: dict[str, float] = {"encoder_items": 0.0, "pictures_sent": 0.0}
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
        self._read_media_settings()
        from vllm.v1.engine.async_llm import AsyncLLM

        from omnifleet_rollout.engine import vllm_seams

        self._compat = Compatibility.of(AsyncLLM)
        try:
            self._llm = launch(self._model, self._config, self._on_stats)
        except (RuntimeError, ValueError, OSError, ImportError, AssertionError, TypeError) as error:
            raise OmnifleetError(
                Reason.ENGINE_ERROR, f"vLLM could not load {self._model}: {error}", knob="rollout.engine"
            ) from error
        vllm_seams.check_front(self._llm, media=self._processor is not None)
        ranks = await self._rpc_all("omni_ready")
        await self._warm_up()
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

    def _read_media_settings(self) -> None:
        """Pictures are served if the checkpoint has an image processor and a placeholder; text models have neither."""
        if self._config.engine.images_per_prompt == 0:
            return
        try:
            self._processor = read_image_processor(self._model)
            self._image_token = image_token_id(self._model)
        except OmnifleetError as error:
            log.info("text only: %s", error.message)
            self._processor = None

    async def shutdown(self) -> None:
        """End everything. Idempotent. See `Engine.shutdown`."""
        if self._polling is not None:
            self._polling.cancel()
            await asyncio.gather(self._polling, return_exceptions=True)
        await self._stack.aclose()
        if self._llm is not None:
            llm, self._llm = self._llm, None
            if llm.output_handler is not None:
                llm.output_handler.cancel()  # else it reports the death that we are about to cause
            await asyncio.to_thread(llm.shutdown, 2.0)

    def alive(self) -> bool:
        """False once dead. See `Engine.alive`."""
        return self._llm is not None and not self._llm.errored

    def stats(self) -> EngineStats:
        """Load of now. See `Engine.stats`."""
        stats = self._stats
        return EngineStats(stats.running, stats.waiting, stats.kv_usage, dict(self._counters))

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

    # ------------------------------------------------------------------ prompts

    async def prepare(self, token_ids: Sequence[int], media: Sequence[MediaRef], run: str) -> EnginePrompt:
        """Expand placeholders and find the media. See `Engine.prepare`."""
        segments = [await self._segment(ref, run) for ref in media]
        counts = [segment.token_count for segment in segments]
        if len(media) > self._config.engine.images_per_prompt:
            raise invalid(
                f"{len(media)} pictures in one prompt, at most {self._config.engine.images_per_prompt} are allowed",
                knob="rollout.engine.images_per_prompt",
            )
        ids, pictures = list(token_ids), None
        if self._image_token is not None:
            ids = expand_placeholders(token_ids, self._image_token, counts)
            pictures = Pictures(segments, placeholder_ranges(token_ids, self._image_token, counts))
        limit = self._config.engine.max_model_len
        if len(ids) >= limit:
            raise invalid(
                f"the expanded prompt has {len(ids)} tokens, max_model_len is {limit}",
                knob="rollout.engine.max_model_len",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return EnginePrompt(ids, pictures if segments else None)

    async def _segment(self, ref: MediaRef, run: str) -> Segment:
        if self._processor is None or ref.kind is not MediaKind.IMAGE:
            raise OmnifleetError(
                Reason.UNSUPPORTED, f"{self._architecture} takes no {ref.kind} here", knob="rollout.engine"
            )
        return await (await self._media_client()).segment(ref, self._processor, run)

    async def _media_client(self) -> MediaClient:
        async with self._media_opening:
            if self._media is None:
                address = await self._find_media()
                self._media = await self._stack.enter_async_context(
                    MediaClient.open(address, self._secret, name="rollout worker")
                )
            return self._media

    def _engine_input(self, request: EngineRequest, *, resend: bool) -> Any:
        """vLLM's rendered form: expanded ids, explicit placeholders, no text, no processor."""
        from vllm.inputs import mm_input, tokens_input

        ids = [*request.prompt.token_ids, *request.prefix]
        pictures: Pictures | None = request.prompt.media
        if pictures is None:
            return tokens_input(ids, cache_salt=request.salt)
        from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange

        return mm_input(
            ids,
            MultiModalKwargsItems(
                {"image": [self._picture(segment, resend) for segment in pictures.segments]}
            ),
            # The key of all of vLLM's caches: content and processor. Encoder outputs depend on weights too, but that
            # cache is emptied by each refit that changes the encoder, so the key needs no epoch and pixels stay cached.
            {"image": [str(segment.key) for segment in pictures.segments]},
            {"image": [PlaceholderRange(offset=at, length=length) for at, length in pictures.ranges]},
            cache_salt=request.salt,
        )

    def _picture(self, segment: Segment, resend: bool) -> Any:
        import torch

        from omnifleet_rollout.engine import vllm_seams

        def make() -> Any:
            self._counters["pictures_sent"] += 1
            # vLLM's tensors may be written to; the mapped segment must not be.
            tensors = {name: torch.from_numpy(array.copy()) for name, array in segment.tensors.items()}
            return vllm_seams.media_item(self._llm, tensors, "image")

        if resend or not self._compat.send_once:
            return make()
        return vllm_seams.send_once(self._llm, str(segment.key), make)

    # ------------------------------------------------------------------ generation

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Deltas of one sample. See `Engine.generate`."""
        resend = False
        while True:
            missed = False
            async with aclosing(self._stream(request, resend=resend)) as deltas:
                async for delta in deltas:
                    missed = delta is None
                    if delta is not None:
                        yield delta
            if not missed:
                return
            if resend or request.prompt.media is None:
                raise OmnifleetError(
                    Reason.ENGINE_ERROR, "vLLM ended the request with an error", retryable=True
                )
            resend = (
                True  # its process had dropped a picture that we thought it had: once more, with the pixels
            )

    async def _stream(
        self, request: EngineRequest, *, resend: bool
    ) -> AsyncGenerator[EngineDelta | None, None]:
        """Deltas of one vLLM request; None if it ended with an error before any token."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        began = False
        try:
            outputs = self._llm.generate(
                self._engine_input(request, resend=resend),
                self._sampling_params(request.sampling, want_text=request.want_text),
                request.id,
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    choice = output.outputs[0]
                    if choice.finish_reason == "error":
                        if began or choice.token_ids:
                            raise OmnifleetError(
                                Reason.ENGINE_ERROR, "vLLM ended the request with an error", retryable=True
                            )
                        yield None
                        return
                    began = began or bool(choice.token_ids)
                    yield _delta(choice, output.num_cached_tokens)
        except EngineDeadError as error:
            raise retryable(Reason.WORKER_LOST, "the vLLM engine died") from error
        except VLLMValidationError as error:
            raise invalid(f"vLLM refused the request: {error}") from error
        except EngineGenerateError as error:
            raise retryable(Reason.ENGINE_ERROR, f"vLLM: {error.__cause__ or error}") from error

    def _sampling_params(self, sampling: Sampling, *, want_text: bool) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        media_tokens = [self._image_token] if self._image_token is not None else []
        return SamplingParams(
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            top_k=sampling.top_k if sampling.top_k > 0 else 0,
            max_tokens=sampling.max_tokens,
            min_tokens=sampling.min_tokens,
            seed=sampling.seed,
            stop=list(sampling.stop),
            stop_token_ids=[*sampling.stop_token_ids, *media_tokens],
            ignore_eos=sampling.ignore_eos,
            logit_bias={token: _BAN for token in sampling.banned_token_ids} or None,
            logprobs=0,
            detokenize=want_text or bool(sampling.stop),
            output_kind=RequestOutputKind.DELTA,
        )

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now. See `Engine.abort`."""
        if ids and self._llm is not None:
            await self._llm.abort(list(ids))

    async def score(self, prompt: EnginePrompt, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of given tokens. See `Engine.score`."""
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        request = EngineRequest(
            id=f"score-{os.urandom(6).hex()}",
            prompt=prompt,
            sampling=Sampling(),
            salt="",
            prefix=tuple(token_ids),
        )
        params = SamplingParams(
            temperature=0.0,
            max_tokens=1,
            prompt_logprobs=0,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        rows: Any = None
        async for output in self._llm.generate(self._engine_input(request, resend=True), params, request.id):
            rows = output.prompt_logprobs
        if rows is None:
            raise retryable(Reason.ENGINE_ERROR, "vLLM gave no prompt logprobs")
        start = len(prompt.token_ids)
        return [float(rows[start + i][token].logprob) for i, token in enumerate(token_ids)]

    # ------------------------------------------------------------------ weights

    async def pause(self) -> None:
        """Freeze at a token boundary. See `Engine.pause`."""
        await self._llm.pause_generation(mode="keep", clear_cache=False)

    async def resume(self) -> None:
        """Go on. See `Engine.resume`."""
        if self._llm is not None:
            await self._llm.resume_generation()

    async def stage(self, manifest_json: str, source: str) -> int:
        """Receive, verify, keep in the shadow, beside the engine's steps. See `Engine.stage`."""
        await self._rpc("omni_stage", manifest_json, source)
        pause = _FIRST_LOOK_S
        while True:
            sizes = [body["bytes"] for body in await self._rpc_all("omni_staged")]
            if None not in sizes:
                return int(sizes[0])
            await asyncio.sleep(pause)
            pause = min(1.2 * pause, _LAST_LOOK_S)

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        """Load the shadow. See `Engine.commit`."""
        loaded = await self._rpc("omni_commit", manifest_digest)
        # Kept requests go on with the KV they have, by policy. New ones never see it: their salt names the new version.
        if policy is not InFlight.KEEP and not await self._llm.reset_prefix_cache(
            reset_running_requests=True
        ):
            raise OmnifleetError(Reason.ENGINE_ERROR, "vLLM kept KV blocks of the old weights")
        if encoder_changed:
            await self._llm.reset_encoder_cache()
        if self._compat.labels:
            await self._llm.update_weight_version(label)
        return int(loaded["tensors"])

    async def drop_stage(self) -> None:
        """Forget the shadow. See `Engine.drop_stage`."""
        await self._rpc("omni_drop")

    async def _rpc(self, method: str, *args: str) -> dict[str, Any]:
        """Call the extension; all ranks must agree. A refusal keeps its reason, anything else is ENGINE_ERROR."""
        return (await self._rpc_all(method, *args))[0]

    async def _rpc_all(self, method: str, *args: str) -> list[dict[str, Any]]:
        """The answers of all ranks."""
        if self._llm is None:
            raise retryable(Reason.WORKER_LOST, "the engine is shut down")
        try:
            answers = await self._llm.collective_rpc(method, timeout=_RPC_S, args=args)
        except Exception as error:
            raise OmnifleetError(Reason.ENGINE_ERROR, f"{method} failed in vLLM: {error}") from error
        bodies = [json.loads(answer) for answer in answers]
        for body in bodies:
            if "reason" in body:
                raise OmnifleetError(Reason(body["reason"]), body["message"], knob=body["knob"])
        return [body["ok"] for body in bodies]


def _delta(choice: Any, cached_tokens: int | None) -> EngineDelta:
    ids = list(choice.token_ids)
    logprobs = [float(row[token].logprob) for row, token in zip(choice.logprobs or (), ids, strict=True)]
    labels = getattr(choice, "weight_versions", None)
    return EngineDelta(
        token_ids=ids,
        logprobs=logprobs,
        text=choice.text,
        finish=_finish(choice.finish_reason),
        stop_reason="" if choice.stop_reason is None else str(choice.stop_reason),
        labels=[LabelSpan(span.version, span.start, span.end) for span in labels] if labels else None,
        cached_tokens=cached_tokens or 0,
    )


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    return FinishReason(reason) if reason in FinishReason.__members__.values() else FinishReason.STOP
