"""What the worker asks of an engine. One implementation a file: `vllm_engine`, `fake`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy.typing as npt

from omnifleet.types import FinishReason, InFlight, LogprobsMode, MediaRef, Sampling
from omnifleet.wire import refit_pb2
from omnifleet.wire.needs import NeedsBody


@dataclass(frozen=True, slots=True)
class EnginePrompt:
    """A prompt as the model will see it.

    token_ids: placeholders expanded, one id a position. media: what the engine needs to embed the media items;
    only the engine that made it may read it. fingerprints: of the processor of each media item, in order.
    """

    token_ids: list[int]
    media: Any = None
    fingerprints: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineRequest:
    """One sample to generate.

    prefix: tokens of the reply that exist already; they are fed after the prompt and not emitted again.
    salt: KV blocks are shared only between requests of equal salt (the weight version).
    want_text: the deltas carry text. in_bulk: nobody reads before the end, so tokens may come some at a time; at a pause and at
    the end all are handed out.
    """

    id: str
    prompt: EnginePrompt
    sampling: Sampling
    salt: str
    prefix: tuple[int, ...] = ()
    priority: int = 0
    want_text: bool = False
    in_bulk: bool = False


@dataclass(frozen=True, slots=True)
class LabelSpan:
    """New tokens [start, end) of one engine request were sampled by weights that the engine calls `label`."""

    label: str
    start: int
    end: int


@dataclass(slots=True)
class EngineDelta:
    """New tokens of one request, in order.

    token_ids, logprobs: equal length; logprob of the sampled token, natural log, in the engine's logprobs mode.
    finish: set on the last delta. labels: on the last delta, if the engine tracks versions itself.
    cached_tokens: prompt tokens whose KV was reused, known from the first delta on.
    routed_experts: on the last delta, if the engine returns it: integers [tokens - 1, layers, experts a token], of the prompt,
    the prefix and the new tokens but the last. sampling_mask: for each new token the ids that it was drawn from.
    """

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    text: str = ""
    finish: FinishReason | None = None
    stop_reason: str = ""
    labels: list[LabelSpan] | None = None
    cached_tokens: int = 0
    routed_experts: npt.NDArray[Any] | None = None
    sampling_mask: list[list[int]] | None = None


EXTRAS = ("routed_experts", "sampling_mask")
"""What an engine may return beside tokens: fields of `EngineDelta`, and settings `rollout.engine.return_...`."""


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What does not change while the engine lives.

    info: "vllm 0.32.0". tensors: the table of the checkpoint that was loaded (name, dtype, shape).
    transports: refit transports. shadow: a refit is staged beside the weights that serve. ranks: processes with weights.
    extras: of EXTRAS, those that come with each reply.
    sparse: tensors may come as what turns the committed version's bytes into the new ones.
    """

    info: str
    model: str
    logprobs_mode: LogprobsMode
    max_model_len: int
    max_num_seqs: int
    tensors: tuple[refit_pb2.TensorSpec, ...]
    transports: tuple[str, ...] = ("shm",)
    shadow: bool = True
    ranks: int = 1
    sparse: bool = False
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class EngineStats:
    """running, waiting: requests. kv_usage: share of KV blocks in use, 0..1. counters: only grow."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)


class Engine(Protocol):
    """One model, one set of weights at a time. Every method but `stats`, `facts` and `alive` may raise OmnifleetError."""

    @property
    def facts(self) -> EngineFacts:
        """Valid after `start`."""
        ...

    async def start(self) -> None:
        """Load the model. Raises MODEL_MISSING, UNSUPPORTED or ENGINE_ERROR."""
        ...

    async def shutdown(self) -> None:
        """Free everything, child processes too. Idempotent."""
        ...

    async def prepare(self, token_ids: Sequence[int], media: Sequence[MediaRef], run: str) -> EnginePrompt:
        """Expand placeholders and fetch model-ready media. Raises INVALID_REQUEST, PROMPT_TOO_LONG, MEDIA_LOST."""
        ...

    def generate(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Deltas until one has `finish`. Closing the iterator aborts the request. Raises ENGINE_ERROR."""
        ...

    async def abort(self, ids: Sequence[str]) -> None:
        """End requests now: each yields a last delta with finish ABORT. Unknown ids are ignored."""
        ...

    async def score(self, prompt: EnginePrompt, token_ids: Sequence[int]) -> list[float]:
        """Logprobs [len(token_ids)] of given tokens after the prompt, under the weights of now."""
        ...

    async def pause(self) -> None:
        """Freeze all requests at a token boundary; returns when their tokens so far were handed out.

        Raises ENGINE_ERROR, retryable, if the engine does not get there in time; `resume` then takes it back.
        """
        ...

    async def resume(self) -> None:
        """Go on. Idempotent. An engine that does not is not `alive` any more."""
        ...

    async def sleep(self, level: int) -> None:
        """Give device memory up, until `wake`: 0 = none, all requests are frozen where they are; 1 = weights go to host
        memory, KV is dropped; 2 = both are dropped. From level 1 on every request was aborted before. Deeper than now, or new.

        Raises ENGINE_ERROR, UNSUPPORTED. An engine that may be half asleep is not `alive` any more.
        """
        ...

    async def wake(self, *, weights_only: bool) -> None:
        """Undo `sleep` and go on. weights_only: only give the weights memory again, so that a commit can write them.

        Raises ENGINE_ERROR; the engine is then not `alive` any more.
        """
        ...

    async def stage(self, manifest_json: str, source: str, *, in_place: bool = False) -> int:
        """Receive a transfer into the shadow and verify it; bytes staged. Raises REFIT_REJECTED, NO_ROOM, weights untouched.

        in_place: while paused, without a shadow: all tensors, each verified before it is written into the weights. After an
        error they may be mixed; a commit must follow.
        source: path of a file in shared memory, or where else the bytes come from (see `omnifleet_rollout.refit`).
        """
        ...

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        """Load the shadow while paused, reset what depends on weights, name the weights `label`; tensors loaded.

        REFIT_REJECTED means that nothing has changed; any other error, that the weights may be mixed.
        """
        ...

    async def drop_stage(self) -> None:
        """Forget the shadow. Idempotent."""
        ...

    def needs(self) -> str:
        """Names what `read_needs` would answer now; "" if the next refit must bring tensors whole."""
        ...

    async def read_needs(self) -> list[NeedsBody]:
        """What each rank reads of each source tensor, so that it can be sent that alone; empty if it can't."""
        ...

    async def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> None:
        """Write source tensors of the committed weights (name, safetensors dtype) one after another into the file at `path`.

        The engine goes on meanwhile; a commit in between makes a mixture, which their digests tell. Raises UNSUPPORTED
        where the engine does not have them as they were sent.
        """
        ...

    async def refresh(self) -> None:
        """Bring the counters of `stats` up to date, if the engine still answers."""
        ...

    def stats(self) -> EngineStats:
        """Load of now; counters as of the last `refresh`, which engines also do on their own."""
        ...

    def alive(self) -> bool:
        """False once the engine can never serve again."""
        ...
