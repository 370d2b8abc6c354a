"""The gateway's chat dialect as an episode uses it: exact tokens, versions and media with every reply; back-pressure obeyed."""

from __future__ import annotations

import asyncio
import base64
import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import httpx

from omnifleet.environments.episode import Turn
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import (
    Digest,
    FinishReason,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Sampling,
    VersionBound,
    VersionSpan,
    WeightVersion,
)

EXTRAS = ("routed_experts", "sampling_mask")
"""What an engine may return beside tokens; fields of replies, base64 of safetensors."""

_WAIT_AND_RETRY = (Reason.OVERLOADED, Reason.NO_WORKER)
_PAUSE_S = 0.05
_SLACK_S = 5.0


class GatewayTalk:
    """One session of the gateway. Replies of one identity are one growing token sequence."""

    def __init__(
        self,
        http: httpx.AsyncClient,
        identity: Identity,
        sampling: Sampling,
        bound: VersionBound,
        *,
        end: float,
        extras: Sequence[str] = (),
    ) -> None:
        """http: with the gateway's address and a bearer token. end: event loop's time at which the episode must be over.

        sampling: of each reply; its seed is that of the first. extras: see `Order`.
        """
        self._http, self._identity, self._sampling, self._bound, self._end = (
            http,
            identity,
            sampling,
            bound,
            end,
        )
        self._extras = tuple(extras)
        self._turns = 0

    async def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        template: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Turn]:
        """See `Talk`. Waits as 429 and 503 advise, until the episode's end."""
        body = self._body(messages, tools, max_tokens, template)
        loop = asyncio.get_running_loop()
        while True:
            try:
                reply = await self._post(body, self._end - loop.time())
                break
            except OmnifleetError as error:
                pause = max(_PAUSE_S, error.retry_after_ms / 1000) * random.uniform(1.0, 1.25)
                if error.reason not in _WAIT_AND_RETRY or loop.time() + pause >= self._end:
                    raise
            await asyncio.sleep(pause)
        self._turns += 1
        return turn_of(reply)

    def _body(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        template: Mapping[str, Any],
    ) -> dict[str, Any]:
        body = {**self.terms(), "messages": list(messages)}
        if max_tokens is not None:
            body["max_tokens"] = min(max_tokens, self._sampling.max_tokens)
        if tools:
            body["tools"] = list(tools)
        if template:
            body["chat_template_kwargs"] = dict(template)
        return body

    def terms(self) -> dict[str, Any]:
        """See `Talk`."""
        s = self._sampling
        terms: dict[str, Any] = {
            "temperature": s.temperature,
            "top_p": s.top_p,
            "top_k": s.top_k,
            "max_tokens": s.max_tokens,
            "stop": list(s.stop),
            "seed": None if s.seed is None else s.seed + self._turns,
            "return_provenance": True,
            "identity": {**asdict(self._identity), "turn": self._turns},
        }
        terms |= {f"return_{name}": True for name in self._extras}
        for name, version in (("min", self._bound.min), ("exact", self._bound.exact)):
            if version is not None:
                terms["weight_version"] = {name: str(version)}
        return terms

    async def _post(self, body: Mapping[str, Any], left_s: float) -> dict[str, Any]:
        if left_s <= 0:
            raise retryable(Reason.DEADLINE, "the episode's time is over", knob="environments.timeout_s")
        headers = {"x-omnifleet-timeout-s": f"{left_s:.3f}"}
        try:
            response = await self._http.post(  # the gateway keeps the deadline; this is for one that is gone
                "/v1/chat/completions", json=body, headers=headers, timeout=left_s + _SLACK_S
            )
        except httpx.TransportError as error:
            kind = type(error).__name__
            raise retryable(Reason.UNAVAILABLE, f"the gateway does not answer: {kind}: {error}") from error
        if response.is_success:
            found: dict[str, Any] = response.json()
            return found
        raise error_of(response)


_SHOWN = re.compile(
    r'"error": ?\{.*?"code": ?"(?P<code>\w+)".*?"retryable": ?(?P<retryable>true|false)', re.DOTALL
)


def refusal_in(text: str) -> OmnifleetError | None:
    """The gateway's refusal as it shows through servers that quote one another's answers; None if there is none."""
    found = _SHOWN.search(text.replace("\\", ""))
    if found is None or found["code"] not in set(Reason):
        return None
    return OmnifleetError(Reason(found["code"]), text[:500], retryable=found["retryable"] == "true")


def error_of(response: httpx.Response) -> OmnifleetError:
    """The gateway's refusal as a typed error."""
    try:
        told = response.json()["error"]
        reason, message = Reason(told["code"]), str(told["message"])
    except (ValueError, KeyError, TypeError):
        reason, message = Reason.UNAVAILABLE, f"HTTP {response.status_code}: {response.text[:200]}"
        told = {"retryable": response.status_code >= 500 or response.status_code in (408, 429)}
    try:
        wait_s = float(response.headers.get("retry-after", 0))
    except ValueError:
        wait_s = 0.0
    return OmnifleetError(
        reason,
        message,
        retryable=bool(told.get("retryable")),
        knob=str(told.get("knob") or ""),
        retry_after_ms=int(wait_s * 1000),
    )


def turn_of(reply: Mapping[str, Any]) -> tuple[dict[str, Any], Turn]:
    """The message to send back, and the turn, of a chat completion with provenance. Raises CORRUPT where it lacks some."""
    try:
        choice, origin = reply["choices"][0], reply["omnifleet"]
        message = choice["message"]
        finish = choice["finish_reason"]
        turn = Turn(
            prompt_token_ids=list(message["prompt_token_ids"]),
            prompt_hash=origin["prompt_hash"],
            media=media_of(origin),
            token_ids=list(message["generation_token_ids"]),
            logprobs=[float(value) for value in message["generation_log_probs"]],
            spans=[span_of(span) for span in choice["omnifleet"]["weight_versions"]],
            finish_reason=FinishReason.STOP if finish == "tool_calls" else FinishReason(finish),
            logprobs_mode=LogprobsMode(origin["logprobs_mode"]),
            text=message.get("content") or "",
            **extras_of(message),
        )
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise OmnifleetError(
            Reason.CORRUPT, f"the reply lacks what training needs: {type(error).__name__}: {error}"
        ) from error
    kept = {
        name: message[name]
        for name in ("role", "content", "tool_calls", "reasoning_content")
        if name in message
    }
    return kept, turn


def extras_of(message: Mapping[str, Any]) -> dict[str, bytes]:
    """What the engine said beside tokens, of a message or an item: fields of `Turn`. Raises ValueError, TypeError."""
    return {name: base64.b64decode(message[name], validate=True) for name in EXTRAS if message.get(name)}


def media_of(origin: Mapping[str, Any]) -> tuple[MediaRef, ...]:
    """The media of an `omnifleet` block."""
    return tuple(MediaRef(MediaKind(m["kind"]), Digest(m["digest"])) for m in origin["media"])


def span_of(span: Mapping[str, Any]) -> VersionSpan:
    """One of a block's `weight_versions`."""
    return VersionSpan(version_of(span["version"]), span["start"], span["end"], span["worker"])


def version_of(text: str) -> WeightVersion:
    """Of `run/lineage:number`. Raises ValueError."""
    name, _, number = text.rpartition(":")
    run, _, lineage = name.partition("/")
    return WeightVersion(run, lineage, int(number))
