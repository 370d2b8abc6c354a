"""Asking the configured endpoints: bounded at once, within a budget, patient with faults, and once for the same thing."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import Callable, Mapping
from typing import Any

import httpx

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.config.services import EndpointConfig, RewardConfig
from omnifleet.errors import OmnifleetError, Reason, invalid, retryable
from omnifleet.flight import SingleFlight
from omnifleet.telemetry.counters import Counters
from omnifleet_reward.answers import Answers
from omnifleet_reward.scorer import Verdict

_LARGEST_ANSWER = 1 << 20
_PAUSES_S = (0.25, 30.0)
_NONSENSE = (ValueError, KeyError, TypeError, IndexError, AttributeError)

Read = Callable[[Any], Verdict]


class Endpoints:
    """The `Network` of scorers: up on entry of `async with`, gone on exit. No redirects, no proxies, no other address."""

    def __init__(self, config: RewardConfig, answers: Answers, counters: Counters) -> None:
        self._config = config
        self._answers = answers
        self._counters = counters
        self._places = {
            name: asyncio.Semaphore(endpoint.concurrency) for name, endpoint in config.endpoints.items()
        }
        self._flight: SingleFlight[str, str] = SingleFlight()
        self._waiting = 0
        counters.gauge("asks_waiting", lambda: self._waiting)

    async def __aenter__(self) -> Endpoints:
        self._http = httpx.AsyncClient(trust_env=False, limits=httpx.Limits(max_connections=None))
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._flight.close()
        await self._http.aclose()
        self._answers.close()

    def model(self, endpoint: str) -> str:
        """Name of the model at a configured endpoint. Raises INVALID_REQUEST."""
        return self._endpoint(endpoint).model

    async def post(self, endpoint: str, body: Mapping[str, Any], read: Read) -> Verdict:
        """What `read` makes of the answer to `body`.

        Raises INVALID_REQUEST (unknown endpoint), INVALID_CONFIG (refused, e.g. the key), FORBIDDEN (budget),
        OVERLOADED (queue), UNAVAILABLE (retryable), INTERNAL (an answer that means nothing).
        """
        config = self._endpoint(endpoint)
        key = digest_bytes(canonical_json([config.url, body]), "judged")
        kept = self._answers.find(key) if config.cached else None
        if kept is not None:
            self._counters.add("asks_cached")
            return _understood(endpoint, kept, read)
        if config.cached:
            answer = await self._flight.do(key, lambda: self._asked(endpoint, key, body, read))
        else:
            answer = await self._asked(endpoint, key, body, read)
        return _understood(endpoint, answer, read)

    def _endpoint(self, name: str) -> EndpointConfig:
        try:
            return self._config.endpoints[name]
        except KeyError:
            known = ", ".join(self._config.endpoints) or "none"
            raise invalid(
                f"endpoint {name!r} is not configured; known: {known}", knob="reward_service.endpoints"
            ) from None

    async def _asked(self, endpoint: str, key: str, body: Mapping[str, Any], read: Read) -> str:
        if self._waiting >= self._config.queue_items:
            raise retryable(
                Reason.OVERLOADED,
                f"{self._waiting} questions to other services wait",
                knob="reward_service.queue_items",
                retry_after_ms=1000,
            )
        self._waiting += 1
        try:
            answer = await self._patiently(endpoint, body, read)
        finally:
            self._waiting -= 1
        if self._config.endpoints[endpoint].cached:
            self._answers.keep(key, answer)
        return answer

    async def _patiently(self, name: str, body: Mapping[str, Any], read: Read) -> str:
        config = self._config.endpoints[name]
        problem = OmnifleetError(Reason.INTERNAL, "")
        for attempt in range(config.attempts):
            pause_s = min(_PAUSES_S[0] * 2**attempt, _PAUSES_S[1]) * random.uniform(0.5, 1.0)
            try:
                async with self._places[name]:
                    answer = await self._once(name, config, body)
                _understood(name, answer, read)
                return answer
            except OmnifleetError as error:
                if error.reason not in (Reason.UNAVAILABLE, Reason.INTERNAL):
                    raise
                problem = error
                pause_s = max(pause_s, min(error.retry_after_ms / 1000, _PAUSES_S[1]))
            if attempt + 1 < config.attempts:
                self._counters.add("asks_repeated")
                await asyncio.sleep(pause_s)
        raise problem

    async def _once(self, name: str, config: EndpointConfig, body: Mapping[str, Any]) -> str:
        """One request, paid for. Raises UNAVAILABLE for a fault that may pass, INVALID_CONFIG for a refusal."""
        knob = f"reward_service.endpoints.{name}"
        self._pay(name, config, knob)
        try:
            async with asyncio.timeout(config.timeout_s):
                async with self._http.stream(
                    "POST", config.url, json=body, headers=_headers(config, knob), timeout=config.timeout_s
                ) as response:
                    text = await _text(response, name)
        except (TimeoutError, httpx.HTTPError, httpx.InvalidURL) as error:
            raise retryable(
                Reason.UNAVAILABLE, f"endpoint {name!r}: {type(error).__name__}: {error}"[:500], knob=knob
            ) from error
        status = response.status_code
        if status == 429 or status >= 500:
            raise retryable(
                Reason.UNAVAILABLE,
                f"endpoint {name!r} answered {status}",
                knob=knob,
                retry_after_ms=_retry_after_ms(response),
            )
        if status != 200:
            raise OmnifleetError(
                Reason.INVALID_CONFIG, f"endpoint {name!r} answered {status}: {text[:200]}", knob=knob
            )
        self._answers.spend(name, tokens=_tokens(text))
        return text

    def _pay(self, name: str, config: EndpointConfig, knob: str) -> None:
        calls, tokens = self._answers.spent(name)
        if calls >= config.budget_calls:
            raise OmnifleetError(
                Reason.FORBIDDEN,
                f"endpoint {name!r}: the budget of {config.budget_calls} calls is spent",
                knob=f"{knob}.budget_calls",
            )
        if config.budget_tokens is not None and tokens >= config.budget_tokens:
            raise OmnifleetError(
                Reason.FORBIDDEN,
                f"endpoint {name!r}: the budget of {config.budget_tokens} tokens is spent",
                knob=f"{knob}.budget_tokens",
            )
        self._answers.spend(name, calls=1)
        self._counters.add("asks")


def _headers(config: EndpointConfig, knob: str) -> dict[str, str]:
    if not config.key_env:
        return {}
    key = os.environ.get(config.key_env, "")
    if not key:
        raise OmnifleetError(
            Reason.INVALID_CONFIG, f"environment variable {config.key_env} is not set", knob=f"{knob}.key_env"
        )
    return {"authorization": f"Bearer {key}"}


async def _text(response: httpx.Response, name: str) -> str:
    body = bytearray()
    async for piece in response.aiter_bytes():
        body += piece
        if len(body) > _LARGEST_ANSWER:
            raise OmnifleetError(Reason.INTERNAL, f"endpoint {name!r} answered over {_LARGEST_ANSWER} bytes")
    return body.decode("utf-8", "replace")


def _understood(name: str, answer: str, read: Read) -> Verdict:
    try:
        return read(json.loads(answer))
    except _NONSENSE as error:
        raise OmnifleetError(
            Reason.INTERNAL, f"endpoint {name!r} answered nonsense: {type(error).__name__}: {error}"[:500]
        ) from error


def _tokens(answer: str) -> int:
    try:
        return int(json.loads(answer)["usage"]["total_tokens"])
    except _NONSENSE:
        return 0


def _retry_after_ms(response: httpx.Response) -> int:
    try:
        return max(0, int(float(response.headers.get("retry-after", "0")) * 1000))
    except ValueError:  # a date; our own pause has to do
        return 0
