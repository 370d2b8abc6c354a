"""A FAKE engine: no model, no torch. For tests of the gateway, fleet, trainer loop and worker, also across processes.

Tokens are a pure function of (prompt, seed, position), so a continued sample equals an uninterrupted one at
temperature 0; weights are names. It never pretends to be a model: its info string says "fake".
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from blake3 import blake3

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.prompt import lay_out
from omnifleet.types import FinishReason, InFlight, LogprobsMode, MediaKind, MediaRef
from omnifleet.wire import refit_pb2
from omnifleet.wire.manifest import DTYPE_BYTES
from omnifleet.wire.needs import NeedsBody
from omnifleet_rollout.engine.port import (
    EXTRAS,
    EngineDelta,
    EngineFacts,
    EnginePrompt,
    EngineRequest,
    EngineStats,
    LabelSpan,
)
from omnifleet_rollout.refit.shadow import check_table, read_transfer, rejected

VOCABULARY = 256
EOS = 0
IMAGE_TOKEN = 1
IMAGE_FEATURES = 4
"""Positions that one picture takes."""


def fake_table(tensors: int = 3) -> tuple[refit_pb2.TensorSpec, ...]:
    """A small tensor table: float32 matrices of 4 x 8."""
    shape = (4, 8)
    size = shape[0] * shape[1] * DTYPE_BYTES["F32"]
    return tuple(
        refit_pb2.TensorSpec(name=f"layers.{i}.weight", dtype="F32", shape=shape, bytes=size)
        for i in range(tensors)
    )


def fake_token(prompt: Sequence[int], seed: int, position: int) -> int:
    """The token at `position` of a reply: 2 .. VOCABULARY - 1, so neither EOS nor a placeholder."""
    text = f"{list(prompt)}|{seed}|{position}".encode()
    return 2 + int.from_bytes(blake3(text).digest(4), "little") % (VOCABULARY - 2)


async def _four_features(ref: MediaRef, run: str) -> int:
    return IMAGE_FEATURES


@dataclass(slots=True)
class _Running:
    request: EngineRequest
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    labels: list[LabelSpan] = field(default_factory=list)


class FakeEngine:
    """Implements `Engine`, which says what each method does. `token_s`: seconds a token; 0 still yields to the loop before each.

    stop_after: position of the EOS token; None = run to max_tokens. fail_commit: the next commit breaks half-way.
    image_token, video_token, audio_token, count_features: placeholders and how many positions an item takes, as a real checkpoint
    says; without an audio_token it takes no sounds.
    experts: of a mixture that it plays; then replies carry routed experts. masks: replies carry sampling masks.
    """

    def __init__(
        self,
        *,
        token_s: float = 0.0,
        stop_after: int | None = None,
        logprobs_mode: LogprobsMode = LogprobsMode.PROCESSED,
        max_model_len: int = 2048,
        max_num_seqs: int = 16,
        table: Sequence[refit_pb2.TensorSpec] | None = None,
        image_token: int = IMAGE_TOKEN,
        video_token: int | None = None,
        audio_token: int | None = None,
        experts: int = 0,
        masks: bool = False,
        count_features: Callable[[MediaRef, str], Awaitable[int]] | None = None,
    ) -> None:
        self.token_s, self.stop_after = token_s, stop_after
        self.fail_commit = False
        self._placeholders = {
            MediaKind.IMAGE: image_token,
            MediaKind.VIDEO: image_token if video_token is None else video_token,
        }
        if audio_token is not None:
            self._placeholders[MediaKind.AUDIO] = audio_token
        self._count_features = count_features or _four_features
        self._experts, self._masks = experts, masks
        self._facts = EngineFacts(
            "fake 0",
            "fake",
            logprobs_mode,
            max_model_len,
            max_num_seqs,
            tuple(table or fake_table()),
            sparse=True,
            extras=tuple(name for name, there in zip(EXTRAS, (experts, masks), strict=True) if there),
        )
        self._label = "default"
        self._running: dict[str, _Running] = {}
        self._go = asyncio.Event()
        self._shadow: tuple[str, int] | None = None
        self._alive = True
        self._has_weights = True
        self.weights: dict[str, bytes] = {}

    @property
    def facts(self) -> EngineFacts:
        """What does not change while the engine lives. See `Engine.facts`."""
        return self._facts

    async def start(self) -> None:
        """Load and be ready. See `Engine.start`."""
        self._go.set()

    async def shutdown(self) -> None:
        """End everything. Idempotent. See `Engine.shutdown`."""
        self.crash()

    def crash(self) -> None:
        """Die as a real engine does: every request fails, nothing works again."""
        self._alive = False
        self._go.set()
        for running in self._running.values():
            running.ended.set()

    async def prepare(self, token_ids: Sequence[int], media: Sequence[MediaRef], run: str) -> EnginePrompt:
        """Expand placeholders and find the media. See `Engine.prepare`."""
        items = [(self._placeholder(ref), await self._count_features(ref, run)) for ref in media]
        expanded, _ = lay_out(token_ids, items, set(self._placeholders.values()))
        if len(expanded) >= self._facts.max_model_len:
            raise invalid(
                f"the prompt has {len(expanded)} tokens, max_model_len is {self._facts.max_model_len}",
                knob="rollout.engine.max_model_len",
                reason=Reason.PROMPT_TOO_LONG,
            )
        return EnginePrompt(expanded, [ref.digest for ref in media], tuple("fake" for _ in media))

    def _placeholder(self, ref: MediaRef) -> int:
        if ref.kind not in self._placeholders:
            knob = "rollout.engine.sounds_per_prompt" if ref.kind is MediaKind.AUDIO else "rollout.engine"
            raise OmnifleetError(Reason.UNSUPPORTED, f"the fake engine takes no {ref.kind}", knob=knob)
        return self._placeholders[ref.kind]

    async def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Deltas of one sample. See `Engine.generate`."""
        running = self._running[request.id] = _Running(request)
        try:
            end = request.sampling.max_tokens
            for step in range(end):
                await self._one_step(running)
                self._check_alive()
                if running.ended.is_set():
                    yield EngineDelta(finish=FinishReason.ABORT, labels=running.labels)
                    return
                yield self._token(running, step, last=step + 1 == end)
                if running.ended.is_set():
                    return
        finally:
            del self._running[request.id]

    async def _one_step(self, running: _Running) -> None:
        """Pass the time of one token; come back early if the request was aborted."""
        try:
            async with asyncio.timeout(self.token_s):
                await running.ended.wait()
        except TimeoutError:
            pass
        while not self._go.is_set() and not running.ended.is_set():
            waits = [asyncio.create_task(e.wait()) for e in (self._go, running.ended)]
            try:
                await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            finally:
                for wait in waits:
                    wait.cancel()

    def _token(self, running: _Running, step: int, *, last: bool) -> EngineDelta:
        request = running.request
        position = len(request.prefix) + step
        stop = self.stop_after is not None and position >= self.stop_after and not request.sampling.ignore_eos
        seed = (request.sampling.seed or 0) & 0xFFFFF
        token = EOS if stop else fake_token(request.prompt.token_ids, seed, position)
        self._mark(running, step)
        delta = EngineDelta([token], [-(token + 1) / VOCABULARY], f" {token}" if request.want_text else "")
        if self._masks:
            delta.sampling_mask = [[token, *(t for t in (2, 3) if t != token)]]
        if stop or last or token in request.sampling.stop_token_ids:
            delta.finish = FinishReason.LENGTH if last and not stop else FinishReason.STOP
            delta.labels = running.labels
            if self._experts:
                seen = len(request.prompt.token_ids) + position
                delta.routed_experts = np.full((seen, 1, 1), token % self._experts, np.uint8)
            running.ended.set()
        return delta

    def _mark(self, running: _Running, step: int) -> None:
        labels = running.labels
        if labels and labels[-1].label == self._label:
            labels[-1] = LabelSpan(self._label, labels[-1].start, step + 1)
        else:
            labels.append(LabelSpan(self._label, step, step + 1))

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now. See `Engine.abort`."""
        for id_ in ids:
            if id_ in self._running:
                self._running[id_].ended.set()

    async def score(self, prompt: EnginePrompt, token_ids: Sequence[int]) -> list[float]:
        """Logprobs of given tokens. See `Engine.score`."""
        self._check_alive()
        return [-(token + 1) / VOCABULARY for token in token_ids]

    async def pause(self) -> None:
        """Freeze at a token boundary. See `Engine.pause`."""
        self._check_alive()
        self._go.clear()

    async def resume(self) -> None:
        """Go on. See `Engine.resume`."""
        self._go.set()

    async def sleep(self, level: int) -> None:
        """Freeze, and from level 1 on have no memory. See `Engine.sleep`."""
        self._check_alive()
        assert level == 0 or not any(not r.ended.is_set() for r in self._running.values()), "abort them first"
        self._go.clear()
        self._has_weights = level == 0
        if level == 2:
            self.weights.clear()

    async def wake(self, *, weights_only: bool) -> None:
        """Go on, or only have weights again. See `Engine.wake`."""
        self._check_alive()
        self._has_weights = True
        if not weights_only:
            self._go.set()

    async def stage(self, manifest_json: str, source: str, *, in_place: bool = False) -> int:
        """Verify a transfer and keep it in the shadow. See `Engine.stage`."""
        body = json.loads(manifest_json)
        check_table(body, {t.name: (t.dtype, list(t.shape)) for t in self._facts.tensors})
        shadow = read_transfer(body, Path(source), self._held)
        self._shadow = manifest_json, len(shadow)
        self._staged = {tensor.name: bytes(tensor.data) for tensor in shadow}
        return sum(len(tensor.data) for tensor in shadow)

    def _held(self, name: str) -> bytes:
        if name not in self.weights:
            raise rejected(f"{name} was never sent")
        return self.weights[name]

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        """Load the shadow. See `Engine.commit`."""
        self._check_alive()
        if self._shadow is None:
            raise rejected("nothing is staged")
        if not self._has_weights:
            raise OmnifleetError(Reason.ENGINE_ERROR, "the weights of the fake engine sleep")
        if self.fail_commit:
            self.fail_commit = False
            raise OmnifleetError(Reason.ENGINE_ERROR, "the fake engine was told to fail this commit")
        self.weights.update(self._staged)
        self._label = label
        loaded = self._shadow[1]
        await self.drop_stage()
        return loaded

    async def drop_stage(self) -> None:
        """Forget the shadow. See `Engine.drop_stage`."""
        self._shadow, self._staged = None, {}

    def needs(self) -> str:
        """Whole tensors. See `Engine.needs`."""
        return ""

    async def read_needs(self) -> list[NeedsBody]:
        """None. See `Engine.read_needs`."""
        return []

    async def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> None:
        """Write what was committed. See `Engine.export`."""
        self._check_alive()
        held = b"".join(self._held(name) for name, _ in tensors)

        def write() -> None:
            with open(path, "r+b", buffering=0) as file:
                file.write(held)

        await asyncio.to_thread(write)

    async def refresh(self) -> None:
        """Bring counters up to date. See `Engine.refresh`."""
        return

    def stats(self) -> EngineStats:
        """Load of now. See `Engine.stats`."""
        slots = self._facts.max_num_seqs
        running = min(len(self._running), slots)
        return EngineStats(running, len(self._running) - running, min(1.0, running / slots))

    def alive(self) -> bool:
        """False once dead. See `Engine.alive`."""
        return self._alive

    def _check_alive(self) -> None:
        if not self._alive:
            raise OmnifleetError(Reason.WORKER_LOST, "the engine died", retryable=True)
