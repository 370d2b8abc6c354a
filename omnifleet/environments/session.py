"""An episode's conversation with the model, as the environment sees it."""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from omnifleet.environments.episode import Episode, Turn, following, join_turns
from omnifleet.environments.task import Task
from omnifleet.errors import invalid
from omnifleet.types import FinishReason, MediaKind, MediaRef

Part = str | bytes | MediaRef
"""Text; the encoded bytes of a picture that the environment made; media by digest."""


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call that the model made. arguments: None if `raw`, the sampled characters, is no JSON object."""

    id: str
    name: str
    arguments: dict[str, Any] | None
    raw: str


@dataclass(frozen=True, slots=True)
class Reply:
    """What the model said. text: without reasoning and calls, where the gateway has parsers for them."""

    text: str
    reasoning: str
    tool_calls: tuple[ToolCall, ...]
    finish_reason: FinishReason
    tokens: int


class Talk(Protocol):
    """The way to the model; `omnifleet.environments.gateway.GatewayTalk` is one."""

    async def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        template: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Turn]:
        """The assistant's message, to be sent back as it is, and its turn. Raises OmnifleetError."""
        ...

    def terms(self) -> dict[str, Any]:
        """Fields of a body, all but what is said: sampling, identity, version bound, provenance."""
        ...


class Session:
    """One episode. Every `ask` extends the same token sequence."""

    def __init__(self, task: Task, talk: Talk, *, seed: int) -> None:
        """seed: for the environment's own dice; the same for all episodes of a group."""
        self.task, self.seed = task, seed
        self._talk = talk
        self._messages: list[dict[str, Any]] = []
        self._turns: list[Turn] = []
        self._template: dict[str, Any] = {}

    @property
    def turns(self) -> int:
        """Replies so far."""
        return len(self._turns)

    def system(self, text: str) -> None:
        """Put a system message first. Raises INVALID_REQUEST once anything was said."""
        if self._messages:
            raise invalid("a system message comes first")
        self._messages.append({"role": "system", "content": text})

    def template(self, **arguments: Any) -> None:
        """Arguments of the chat template, e.g. enable_thinking. Raises INVALID_REQUEST once the model was asked."""
        if self._turns:
            raise invalid("the template's arguments are set before the first turn")
        self._template.update(arguments)

    def answer(self, call: ToolCall, *parts: Part) -> None:
        """Say what a tool call gave; the model hears of it with the next `ask`."""
        self._messages.append({"role": "tool", "tool_call_id": call.id, "content": _content(parts)})

    async def ask(
        self, *parts: Part, tools: Sequence[Mapping[str, Any]] = (), max_tokens: int | None = None
    ) -> Reply:
        """Say something as the user (nothing: go on from tool results) and return the model's reply.

        tools: JSON-schema functions as in OpenAI's chat. max_tokens: default is the recipe's. A gateway that is busy is
        waited for. Raises OmnifleetError; an environment lets it pass, the episode then ends as `Lost`.
        """
        if parts:
            self._messages.append({"role": "user", "content": _content(parts)})
        message, turn = await self.say(self._messages, tools, max_tokens, self._template)
        _by_digest(self._messages, turn.media)
        self._messages.append(message)
        return Reply(
            text=message.get("content") or "",
            reasoning=message.get("reasoning_content") or "",
            tool_calls=tuple(_call(call) for call in message.get("tool_calls") or ()),
            finish_reason=turn.finish_reason,
            tokens=len(turn.token_ids),
        )

    def terms(self) -> dict[str, Any]:
        """For an agent that asks the gateway itself: what each of its requests must say beside its own messages.

        temperature, top_p, top_k, max_tokens, stop, seed, identity, weight_version, return_provenance.
        """
        return self._talk.terms()

    async def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        max_tokens: int | None = None,
        template: Mapping[str, Any] | None = None,
    ) -> tuple[dict[str, Any], Turn]:
        """Ask with a whole conversation in OpenAI's form, for an agent that keeps its own; the assistant's message and its turn.

        Each must begin with the one before and its reply, as they were. Raises like `ask`.
        """
        message, turn = await self._talk.say(messages, tools, max_tokens, template or {})
        self.hear(turn)
        return message, turn

    def hear(self, *turns: Turn) -> None:
        """Take over the turns that such an agent had. They are held to the same as those of `ask`; see `join_turns`."""
        for turn in turns:
            self._turns.append(following(turn, self._turns[-1] if self._turns else None))

    def episode(self) -> Episode | None:
        """All turns as one sequence, None before the first. Raises CORRUPT; see `join_turns`."""
        return join_turns(self._turns) if self._turns else None


def _content(parts: Sequence[Part]) -> str | list[dict[str, Any]]:
    if len(parts) == 1 and isinstance(parts[0], str):
        return parts[0]
    return [_part(part) for part in parts]


def _part(part: Part) -> dict[str, Any]:
    if isinstance(part, str):
        return {"type": "text", "text": part}
    if isinstance(part, MediaRef):
        kind, url = part.kind, part.url
    else:  # the media service looks at the bytes, not at the type that is told
        kind, url = MediaKind.IMAGE, "data:image/png;base64," + base64.b64encode(part).decode()
    return {"type": f"{kind}_url", f"{kind}_url": {"url": url}}


def _by_digest(messages: Sequence[Mapping[str, Any]], media: Sequence[MediaRef]) -> None:
    """Replace sources by the references that the gateway told: later turns need not carry the bytes again."""
    refs = iter(media)
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] != "text":
                part[part["type"]] = {"url": next(refs).url}


def _call(call: Mapping[str, Any]) -> ToolCall:
    function = call["function"]
    try:
        arguments = json.loads(function["arguments"])
    except ValueError:
        arguments = None
    given = arguments if isinstance(arguments, dict) else None
    return ToolCall(str(call.get("id", "")), function["name"], given, function["arguments"])
