"""A conversation's next turn: exact tokens where they are known, the template's word for the rest; then kept for the turn after."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnifleet.client.rollout import Rendered
from omnifleet.errors import invalid
from omnifleet.types import Identity
from omnifleet_rollout.gateway.parsing import ToolCall
from omnifleet_rollout.gateway.parts import Plain, PutMedia, plain_messages, plain_reply
from omnifleet_rollout.gateway.renderer import NoContinuation, Renderer, RendererLoader
from omnifleet_rollout.gateway.sessions import Sessions
from omnifleet_rollout.gateway.turns import History, Prefix, Turn, message_digest, next_head, token_array


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What a dialect asks to be rendered. required_prefix: expanded ids through the last assistant message, or empty.

    rerender: a history that was changed, or ends in what nothing can follow, begins anew instead of being refused.
    """

    messages: Any
    tools: Sequence[Mapping[str, Any]] = ()
    template_kwargs: Mapping[str, Any] = field(default_factory=dict)
    required_prefix: Sequence[int] = ()
    rerender: bool = False


@dataclass(frozen=True, slots=True)
class Conversation:
    """A rendered turn, and what is needed to remember its replies."""

    who: Identity
    rendered: Rendered
    history: History
    prefix: Prefix | None


class Conversations:
    """Opens turns and keeps their replies. A session is remembered under (run, session); without one, nothing is."""

    def __init__(
        self, renderer: RendererLoader, put_media: PutMedia, sessions: Sessions, timeout_s: float
    ) -> None:
        self._renderer, self._put_media = renderer, put_media
        self._sessions, self._timeout_s = sessions, timeout_s

    async def open(self, prompt: ChatPrompt, who: Identity) -> Conversation:
        """Render a turn. Raises INVALID_REQUEST, INVALID_MEDIA, UNSUPPORTED, MODEL_MISSING, HISTORY_CHANGED."""
        renderer = await self._renderer.get(self._timeout_s)
        messages = await plain_messages(prompt.messages, who.run, self._put_media)
        history = History.of(messages)
        prefix = _required(prompt, messages, renderer) or self._known(prompt, messages, history, who)
        told: dict[str, Any] = {"tools": prompt.tools, "kwargs": prompt.template_kwargs}
        if prefix is not None:
            try:
                rendered = renderer.extend(prefix, messages, **told)
                return Conversation(who, rendered, history, prefix)
            except NoContinuation:
                if not (prompt.rerender and prefix.turn):
                    raise
        return Conversation(who, renderer.render(messages, **told), history, None)

    def keep(
        self, turn: Conversation, content: str, calls: Sequence[ToolCall], token_ids: Sequence[int]
    ) -> None:
        """Remember one sampled reply as the client will send it back; on return it survives a killed process."""
        if not turn.who.session or not token_ids:
            return
        reply = message_digest(plain_reply(content, [(call.name, call.arguments) for call in calls]))
        known = turn.prefix if turn.prefix is not None and turn.prefix.turn else None
        start = (known.end, len(known.token_ids), len(known.media)) if known else (0, 0, 0)
        kept = Turn(
            key=next_head(turn.history.heads[-1], reply),
            parent=known.turn if known else "",
            messages=(*turn.history.digests[start[0] :], reply),
            prompt=token_array(turn.rendered.token_ids[start[1] :]),
            reply=token_array(token_ids),
            media=tuple(turn.rendered.media[start[2] :]),
        )
        self._sessions.record(turn.who, kept)

    def _known(
        self, prompt: ChatPrompt, messages: Sequence[Plain], history: History, who: Identity
    ) -> Prefix | None:
        if not who.session:
            return None
        memory = self._sessions.memory(who.run, who.session)
        return memory.prefix(messages, history, explain=not prompt.rerender)


def _required(prompt: ChatPrompt, messages: Sequence[Plain], renderer: Renderer) -> Prefix | None:
    """The prefix that the client sends itself: in the field of its own, or on the last assistant message that has it."""
    replies = [i for i, message in enumerate(messages) if message.body["role"] == "assistant"]
    ids = list(prompt.required_prefix)
    if ids and not replies:
        raise invalid("required_prefix_token_ids needs the assistant message that it ends with")
    for i in reversed(replies):
        given = prompt.messages[i]
        ids = ids or [*(given.get("prompt_token_ids") or ()), *(given.get("generation_token_ids") or ())]
        if ids:
            if not all(type(id) is int and 0 <= id < 1 << 32 for id in ids):
                raise invalid(f"the token ids of messages[{i}] must be whole numbers")
            media = [ref for message in messages[: i + 1] for ref in message.media]
            return Prefix(i + 1, renderer.unexpanded(ids), media)
    return None
