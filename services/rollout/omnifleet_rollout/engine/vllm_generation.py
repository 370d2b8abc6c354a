"""Requests to vLLM's AsyncLLM, and its replies in our words.

Token-in, token-out. A generated media placeholder ends the reply (finish `stop`): it could not be fed back without its
picture. It is not banned unless `rollout.engine.media_tokens` says so, because a ban changes the distribution that the trainer
must reproduce.
"""

from __future__ import annotations

import os
from collections.abc import AsyncGenerator, Collection, Sequence
from contextlib import aclosing
from typing import Any

from omnifleet.config.services import EngineConfig
from omnifleet.errors import Reason, invalid, retryable
from omnifleet.types import FinishReason, Sampling
from omnifleet_rollout.engine import vllm_seams as seams
from omnifleet_rollout.engine.port import EngineDelta, EnginePrompt, EngineRequest, LabelSpan
from omnifleet_rollout.engine.vllm_compat import Compatibility
from omnifleet_rollout.engine.vllm_media import PromptMedia

_BAN = -100.0
"""vLLM's strongest logit bias: exp(-100) is nothing in float32."""


class Generation:
    """Token streams and scores of one AsyncLLM."""

    def __init__(
        self, llm: Any, media: PromptMedia, engine: EngineConfig, compatibility: Compatibility
    ) -> None:
        self._llm, self._media, self._engine, self._compat = llm, media, engine, compatibility

    async def stream(self, request: EngineRequest) -> AsyncGenerator[EngineDelta, None]:
        """Deltas of one sample. See `Engine.generate`."""
        again = False
        while True:
            missed = False
            async with aclosing(self._attempt(request, again=again)) as deltas:
                async for delta in deltas:
                    missed = delta is None
                    if delta is not None:
                        yield delta
            if not missed:
                return
            if again or request.prompt.media is None:
                raise retryable(Reason.ENGINE_ERROR, "vLLM ended the request with an error")
            # Its process had dropped a picture that we thought it had: once more, with the pixels.
            again = True

    async def _attempt(
        self, request: EngineRequest, *, again: bool
    ) -> AsyncGenerator[EngineDelta | None, None]:
        """Deltas of one vLLM request; None if it ended with an error before any token."""
        from vllm.exceptions import VLLMValidationError
        from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

        began = False
        try:
            outputs = self._llm.generate(
                self._input(request, again=again),
                sampling_params(
                    request.sampling,
                    self._media.tokens,
                    ban=self._engine.media_tokens == "ban",
                    want_text=request.want_text,
                ),
                request.id,
                priority=request.priority,
            )
            async with aclosing(outputs):
                async for output in outputs:
                    choice = output.outputs[0]
                    if choice.finish_reason == "error":
                        if began or choice.token_ids:
                            raise retryable(Reason.ENGINE_ERROR, "vLLM ended the request with an error")
                        yield None
                        return
                    if request.in_bulk and not began and choice.token_ids:
                        seams.hold_back(self._llm, request.id, self._engine.bulk_tokens)
                    began = began or bool(choice.token_ids)
                    delta = delta_of(choice, output.num_cached_tokens)
                    _check_extras(delta, self._engine)
                    yield delta
        except EngineDeadError as error:
            raise retryable(Reason.WORKER_LOST, "the vLLM engine died") from error
        except VLLMValidationError as error:
            raise invalid(f"vLLM refused the request: {error}") from error
        except EngineGenerateError as error:
            raise retryable(Reason.ENGINE_ERROR, f"vLLM: {error.__cause__ or error}") from error

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
        async for output in self._llm.generate(self._input(request, again=False), params, request.id):
            rows = output.prompt_logprobs
        if rows is None:
            raise retryable(Reason.ENGINE_ERROR, "vLLM gave no prompt logprobs")
        start = len(prompt.token_ids)
        return [float(rows[start + i][token].logprob) for i, token in enumerate(token_ids)]

    def _input(self, request: EngineRequest, *, again: bool) -> Any:
        send_all = not self._compat.retryable_miss
        return self._media.engine_input(
            self._llm, request.prompt, request.prefix, request.salt, send_all=send_all, again=again
        )


def sampling_params(sampling: Sampling, media: Collection[int], *, ban: bool, want_text: bool) -> Any:
    """As vLLM's SamplingParams. media: placeholders, each of which ends the reply; ban: they are never drawn."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    banned = {*sampling.banned_token_ids, *(media if ban else ())}
    return SamplingParams(
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=sampling.top_k if sampling.top_k > 0 else 0,
        max_tokens=sampling.max_tokens,
        min_tokens=sampling.min_tokens,
        seed=sampling.seed,
        stop=list(sampling.stop),
        stop_token_ids=[*sampling.stop_token_ids, *media],
        ignore_eos=sampling.ignore_eos,
        logit_bias=dict.fromkeys(sorted(banned), _BAN) or None,
        logprobs=0,
        flat_logprobs=True,  # three lists instead of two objects a token
        detokenize=want_text or bool(sampling.stop),
        output_kind=RequestOutputKind.DELTA,
    )


def delta_of(choice: Any, cached_tokens: int | None) -> EngineDelta:
    """One output of vLLM in our words. Raises ENGINE_ERROR if its logprobs are of other tokens."""
    ids = list(choice.token_ids)
    # One entry a token. 0.25.1 repeats those of the whole reply behind those of an abort that brings no tokens.
    flat = choice.logprobs
    if ids and list(flat.token_ids[: len(ids)]) != ids:
        raise retryable(Reason.ENGINE_ERROR, "vLLM's logprobs are not those of its tokens")
    logprobs = flat.logprobs[: len(ids)] if ids else []
    labels = getattr(choice, "weight_versions", None)
    return EngineDelta(
        token_ids=ids,
        logprobs=logprobs,
        text=choice.text,
        finish=_finish(choice.finish_reason),
        stop_reason="" if choice.stop_reason is None else str(choice.stop_reason),
        labels=[LabelSpan(span.version, span.start, span.end) for span in labels] if labels else None,
        cached_tokens=cached_tokens or 0,
        routed_experts=choice.routed_experts,
        sampling_mask=_masks(getattr(choice, "sampling_mask", None)),
    )


def _masks(mask: Any) -> list[list[int]] | None:
    return None if mask is None else [[int(token) for token in row] for row in mask.token_ids]


def _finish(reason: str | None) -> FinishReason | None:
    if reason is None:
        return None
    return FinishReason(reason) if reason in FinishReason.__members__.values() else FinishReason.STOP


def _check_extras(delta: EngineDelta, engine: EngineConfig) -> None:
    """What the recipe wants returned must be there: vLLM may drop it (at a preemption), and a gap is no sample."""
    whole = delta.finish in (FinishReason.STOP, FinishReason.LENGTH)
    if whole and engine.return_routed_experts and delta.routed_experts is None:
        raise retryable(Reason.ENGINE_ERROR, "vLLM returned no routed experts for this reply")
    masks = delta.sampling_mask if delta.sampling_mask is not None else ()
    if engine.return_sampling_mask and len(masks) != len(delta.token_ids):
        raise retryable(
            Reason.ENGINE_ERROR,
            f"vLLM returned {len(masks)} sampling masks for {len(delta.token_ids)} tokens",
        )
