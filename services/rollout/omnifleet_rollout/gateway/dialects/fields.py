"""What every dialect's body may say beside its own words: sampling, identity, versions, provenance; and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from omnifleet.config.recipe import SamplingConfig
from omnifleet.errors import invalid
from omnifleet.types import Identity, Sampling, VersionBound, WeightVersion

_NOTHING: tuple[Any, ...] = (None,)
Refused = Mapping[str, tuple[Any, ...]]
"""field -> the values that change nothing; any other value cannot be honoured."""

REFUSED: Refused = {
    "logit_bias": (None, {}),
    "presence_penalty": (None, 0),
    "frequency_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "length_penalty": (None, 1),
    "min_p": (None, 0),
    "typical_p": (None, 1),
    "best_of": (None, 1),
    "use_beam_search": (None, False),
    "echo": (None, False),
    "suffix": (None, ""),
    "add_special_tokens": (None, False),
    "include_stop_str_in_output": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "truncate_prompt_tokens": _NOTHING,
    "prompt_logprobs": (None, 0),
    "structured_outputs": _NOTHING,
    "guided_json": _NOTHING,
    "guided_regex": _NOTHING,
    "guided_choice": _NOTHING,
    "guided_grammar": _NOTHING,
    "bad_words": (None, []),
    "allowed_token_ids": _NOTHING,
    "mm_processor_kwargs": (None, {}),
    "media_io_kwargs": (None, {}),
    "kv_transfer_params": _NOTHING,
}
WITHOUT_EFFECT = frozenset(
    {"user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention", "service_tier"}
)
_HEADERS = {
    "run": "x-omnifleet-run",
    "environment": "x-omnifleet-environment",
    "session": "x-omnifleet-session",
    "episode": "x-omnifleet-episode",
}


class IdentityBody(BaseModel):
    """Who a request belongs to; the headers x-omnifleet-run, -environment, -session and -episode say the same."""

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


class CommonFields(BaseModel):
    """Fields that every dialect honours. None = the recipe's sampling decides."""

    model_config = ConfigDict(extra="allow")

    model: str | None = None
    stream: bool | None = False
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=-1)
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    min_tokens: int | None = Field(None, ge=0)
    ignore_eos: bool = False
    priority: int = Field(0, ge=-(1 << 31), lt=1 << 31)
    return_token_ids: bool = False
    return_media: bool = False
    return_provenance: bool = False
    return_routed_experts: bool = False
    return_sampling_mask: bool = False
    weight_version: dict[str, Any] | None = None
    identity: IdentityBody = Field(default_factory=IdentityBody)

    @property
    def samples(self) -> int:
        """Replies asked for."""
        return 1

    @property
    def limit(self) -> int | None:
        """Longest reply asked for, tokens."""
        return None

    @property
    def extras(self) -> tuple[str, ...]:
        """What the engine must return beside tokens."""
        return tuple(n for n in ("routed_experts", "sampling_mask") if getattr(self, f"return_{n}"))

    def sampling(self, defaults: SamplingConfig) -> Sampling:
        """How tokens are drawn: the request's word, else the recipe's."""
        stop = defaults.stop if self.stop is None else self.stop
        return Sampling(
            temperature=defaults.temperature if self.temperature is None else self.temperature,
            top_p=defaults.top_p if self.top_p is None else self.top_p,
            top_k=defaults.top_k if self.top_k is None else self.top_k,
            max_tokens=defaults.max_tokens if self.limit is None else self.limit,
            n=self.samples,
            seed=None if self.seed is None else self.seed % (1 << 63),
            stop=(stop,) if isinstance(stop, str) else tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            min_tokens=self.min_tokens or 0,
            ignore_eos=self.ignore_eos,
        )


class ChatFields(CommonFields):
    """Fields of the dialects whose prompt is a conversation.

    required_prefix_token_ids: expanded ids through the last assistant message. on_history_change: what to do when a
    session's history is not what its exact tokens stand for.
    """

    tools: list[Any] | None = None
    tool_choice: Any = None
    chat_template_kwargs: dict[str, Any] | None = None
    required_prefix_token_ids: list[int] | None = None
    on_history_change: Literal["refuse", "rerender"] = "refuse"


Body = TypeVar("Body", bound=CommonFields)


def parse(body: bytes, kind: type[Body], refused: Refused) -> tuple[Body, list[str]]:
    """A body and the names of its unknown fields. Raises INVALID_REQUEST that names every field at fault."""
    try:
        request = kind.model_validate(_unfolded(json.loads(body)))
    except ValidationError as error:
        faults = (f"{'.'.join(str(at) for at in fault['loc'])}: {fault['msg']}" for fault in error.errors())
        raise invalid("; ".join(faults)) from None
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body is not a JSON object: {error}") from error
    extra, known = request.model_extra or {}, {**REFUSED, **refused}
    faulty = sorted(name for name, value in extra.items() if name in known and value not in known[name])
    if faulty:
        raise invalid(f"these fields cannot be honoured here: {', '.join(faulty)}; leave them out")
    return request, sorted(extra.keys() - known.keys() - WITHOUT_EFFECT)


def _unfolded(body: Any) -> Any:
    """The body with the fields of metadata.extra_body, JSON text, where it has none of its own.

    NeMo Gym's agents may add no fields to a body; this is how its rows reach a model server nevertheless.
    """
    metadata = body.get("metadata") if isinstance(body, dict) else None
    text = metadata.get("extra_body") if isinstance(metadata, dict) else None
    if not isinstance(text, str):
        return body
    extra = json.loads(text)
    if not isinstance(extra, dict):
        raise invalid("metadata.extra_body is not a JSON object")
    return {**extra, **body}


def identity_of(request: CommonFields, headers: Mapping[str, str]) -> Identity:
    """The body's identity; a header fills what the body leaves empty."""
    body = request.identity.model_dump()
    for name, header in _HEADERS.items():
        body[name] = body[name] or headers.get(header, "")
    return Identity(**{**body, "run": body["run"] or "default"})


def timeout_of(headers: Mapping[str, str]) -> float | None:
    """Seconds of the header x-omnifleet-timeout-s. Raises INVALID_REQUEST."""
    text = headers.get("x-omnifleet-timeout-s", "")
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds < 1e7:
        raise invalid(f"x-omnifleet-timeout-s {text!r} is not a number of seconds above 0")
    return seconds


def bound_of(
    request: CommonFields, headers: Mapping[str, str], target: Callable[[], WeightVersion | None]
) -> VersionBound:
    """The bound of the body's weight_version {min | exact: VERSION}, or of the header `min=VERSION` / `exact=VERSION`.

    VERSION is "run/lineage:number" or a number in the lineage of `target()`. Raises INVALID_REQUEST.
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
    version = _version(value, target())
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
