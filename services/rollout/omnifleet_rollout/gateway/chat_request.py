"""The body of /v1/chat/completions: what is honoured, what is refused by name, what is ignored with a warning."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnifleet.config.recipe import SamplingConfig
from omnifleet.errors import invalid
from omnifleet.types import Identity, Sampling, VersionBound, WeightVersion

_NOTHING: tuple[Any, ...] = (None,)
_REFUSED: dict[str, tuple[Any, ...]] = {
    # field -> the values that change nothing; any other value cannot be honoured
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": _NOTHING,
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "top_logprobs": (None, 0),
    "prompt_logprobs": (None, 0),
    "modalities": (None, ["text"]),
    "audio": _NOTHING,
    "prediction": _NOTHING,
    "web_search_options": _NOTHING,
    "reasoning_effort": _NOTHING,
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "add_generation_prompt": (None, True),
    "continue_final_message": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "truncate_prompt_tokens": _NOTHING,
    "store": (None, False),
}
_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "safety_identifier",
        "prompt_cache_key",
        "service_tier",
        "parallel_tool_calls",
        "verbosity",
    }
)
_IDENTITY_HEADERS = {"run": "x-omnifleet-run", "session": "x-omnifleet-session"}


class IdentityBody(BaseModel):
    """Who a request belongs to; headers x-omnifleet-run and x-omnifleet-session say the same."""

    model_config = ConfigDict(extra="forbid", strict=True)

    run: str = ""
    environment: str = ""
    session: str = ""
    episode: str = ""
    turn: int = Field(0, ge=0)
    prompt_id: str = ""
    group_id: str = ""
    sample: int = Field(0, ge=0)
    attempt: str = ""


class StreamOptions(BaseModel):
    """include_usage: a last chunk with the usage of the whole request."""

    model_config = ConfigDict(extra="ignore")

    include_usage: bool = False


class ChatRequest(BaseModel):
    """Fields that are honoured. None = the recipe's sampling decides."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    messages: list[Any]
    n: int = Field(1, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    min_tokens: int = Field(0, ge=0)
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    ignore_eos: bool = False
    stop_token_ids: list[int] = []
    logprobs: bool | None = False
    priority: int = 0
    chat_template_kwargs: dict[str, Any] = {}
    return_token_ids: bool = False
    return_media: bool = False
    weight_version: dict[str, Any] | None = None
    identity: IdentityBody = IdentityBody()

    def sampling(self, defaults: SamplingConfig) -> Sampling:
        """How tokens are drawn: the request's word, else the recipe's."""
        stop = defaults.stop if self.stop is None else self.stop
        asked = self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            max_tokens=defaults.max_tokens if asked is None else asked,
            n=self.n,
            seed=None if self.seed is None else self.seed % (1 << 63),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids),
            min_tokens=self.min_tokens,
            ignore_eos=self.ignore_eos,
        )


def parse(body: bytes) -> tuple[ChatRequest, list[str]]:
    """A body and the names of its unknown fields. Raises INVALID_REQUEST that names every field at fault."""
    try:
        request = ChatRequest.model_validate(json.loads(body))
    except ValidationError as error:
        faults = (f"{'.'.join(str(at) for at in fault['loc'])}: {fault['msg']}" for fault in error.errors())
        raise invalid("; ".join(faults)) from None
    except ValueError as error:
        raise invalid(f"the body is not a JSON object: {error}") from error
    extra = request.model_extra or {}
    refused = sorted(
        name for name, value in extra.items() if name in _REFUSED and value not in _REFUSED[name]
    )
    if refused:
        raise invalid(f"these fields cannot be honoured here: {', '.join(refused)}; leave them out")
    return request, sorted(extra.keys() - _REFUSED.keys() - _WITHOUT_EFFECT)


def identity_of(request: ChatRequest, headers: Mapping[str, str]) -> Identity:
    """The body's identity; a header fills what the body leaves empty."""
    body = request.identity.model_dump()
    for name, header in _IDENTITY_HEADERS.items():
        body[name] = body[name] or headers.get(header, "")
    return Identity(**{**body, "run": body["run"] or "default"})


def bound_of(request: ChatRequest, headers: Mapping[str, str], target: WeightVersion | None) -> VersionBound:
    """The bound of the body's weight_version {min | exact: VERSION}, or of the header `min=VERSION` / `exact=VERSION`.

    VERSION is "run/lineage:number" or a number in the lineage of `target`. Raises INVALID_REQUEST.
    """
    given: dict[str, Any] = {k: v for k, v in (request.weight_version or {}).items() if v is not None}
    if not given and (header := headers.get("x-omnifleet-weight-version", "")):
        key, _, value = header.partition("=")
        given = {key.strip(): value.strip()}
    if not given:
        return VersionBound()
    if len(given) != 1 or not given.keys() <= {"min", "exact"}:
        raise invalid(f"weight_version takes one of min and exact, not {', '.join(map(str, given))}")
    key, value = next(iter(given.items()))
    version = _version(value, target)
    return VersionBound(min=version) if key == "min" else VersionBound(exact=version)


def _version(value: Any, target: WeightVersion | None) -> WeightVersion:
    text = str(value)
    name, colon, number = text.rpartition(":")
    run, slash, lineage = name.partition("/")
    if number.isdecimal() and not isinstance(value, bool):
        if colon and slash and lineage:
            return WeightVersion(run, lineage, int(number))
        if not colon and target is not None:
            return WeightVersion(target.run, target.lineage, int(number))
    raise invalid(
        f"weight version {text!r} is not of the form run/lineage:number"
        + ("" if target is not None else " (a bare number needs a fleet with a target version)")
    )
