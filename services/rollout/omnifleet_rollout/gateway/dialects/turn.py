"""Opening a conversation's next turn: what chat completions and Responses do alike before they differ in form."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request

from omnifleet.client.rollout import Event
from omnifleet.errors import invalid
from omnifleet_rollout.gateway.conversation import ChatPrompt, Conversation
from omnifleet_rollout.gateway.dialects.asking import ask, events
from omnifleet_rollout.gateway.dialects.fields import ChatFields
from omnifleet_rollout.gateway.dialects.reply import Reply
from omnifleet_rollout.gateway.gateway import Gateway
from omnifleet_rollout.gateway.parsing import Parsers


@dataclass(frozen=True, slots=True)
class Opened:
    """A turn that may be generated: its place in the conversation, its reply, and the events that will fill it."""

    turn: Conversation
    reply: Reply
    events: AsyncGenerator[Event, None]


async def open_turn(
    gateway: Gateway,
    http: Request,
    request: ChatFields,
    kind: str,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Any] | None,
) -> Opened:
    """Render the messages onto what the conversation holds. kind: first part of the reply's id.

    Raises what `ask`, the conversation and the renderer raise, and INVALID_REQUEST for tools that cannot be honoured.
    """
    asked = ask(gateway, http, request)
    gateway.dispatcher.expect_room(asked.who.run, asked.sampling.n)
    parsers = await gateway.parsers.get()
    shown = usable_tools(tools, request.tool_choice, parsers)
    prompt = ChatPrompt(
        messages,
        shown,
        request.chat_template_kwargs or {},
        request.required_prefix_token_ids or (),
        rerender=request.on_history_change == "rerender",
    )
    turn = await gateway.conversations.open(prompt, asked.who)
    renderer = await gateway.renderer.get(gateway.config.request_timeout_s)
    reply = Reply(
        kind,
        request,
        asked.sampling,
        renderer,
        asked.model,
        parsers=parsers,
        tools=shown,
        template_kwargs=prompt.template_kwargs,
    )
    stream = bool(request.stream)
    return Opened(
        turn, reply, events(gateway, asked, reply.id, turn.rendered, with_ids=reply.with_ids, stream=stream)
    )


def usable_tools(tools: Sequence[Any] | None, choice: Any, parsers: Parsers | None) -> list[dict[str, Any]]:
    """The tools that the model is shown. Raises INVALID_REQUEST for what cannot be honoured."""
    if choice not in (None, "none", "auto"):
        raise invalid(
            f"tool_choice {choice!r}: allowed are auto and none, since forcing a call would change the distribution that "
            "the tokens are sampled from"
        )
    if not tools or choice == "none":
        return []
    if parsers is None or parsers.tool_class is None:
        raise invalid(
            "tools cannot be honoured here: no parser of tool calls is set", knob="gateway.tool_parser"
        )
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, Mapping) else None
        named = isinstance(function, Mapping) and isinstance(function.get("name"), str)
        if not named or tool.get("type") != "function":
            raise invalid(f"tools[{i}] must be a function with a name")
    return list(tools)
