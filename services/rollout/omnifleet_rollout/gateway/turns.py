"""What a session has said so far: which tokens a conversation's history stands for, and why a history is not known.

A turn is one prompt and one reply that was sampled for it. Its key is a digest over the history, message by message, so a
next request finds the longest history whose exact tokens are known, whichever of n replies the client went on with.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import MediaRef
from omnifleet_rollout.gateway.parts import Plain

MAX_TURNS = 10_000
"""Turns of one session, all branches together."""


def token_array(token_ids: Iterable[int]) -> array[int]:
    """Ids in four bytes each: sessions hold many."""
    return array("I", token_ids)


@dataclass(frozen=True, slots=True)
class Turn:
    """One prompt and one reply, as what they add to `parent` ("" = nothing before).

    key: of the history through the reply. messages: digests of the messages since the parent, the reply last.
    prompt: unexpanded ids since the parent's reply; reply: the sampled ids; both uint32. media: of `messages`, in order.
    """

    key: str
    parent: str
    messages: tuple[str, ...]
    prompt: array[int]
    reply: array[int]
    media: tuple[MediaRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Prefix:
    """Exact tokens of messages[:end]; `reply` of them, at the end, were sampled. turn: its key, "" if a client sent it."""

    end: int
    token_ids: list[int]
    media: list[MediaRef]
    turn: str = ""


@dataclass(frozen=True, slots=True)
class History:
    """The messages of one request. heads[i]: digest of messages[:i]. digests[i]: of messages[i]."""

    digests: list[str]
    heads: list[str]

    @staticmethod
    def of(messages: Sequence[Plain]) -> History:
        """Digests of a conversation."""
        digests, heads = [message_digest(message) for message in messages], [""]
        for digest in digests:
            heads.append(next_head(heads[-1], digest))
        return History(digests, heads)


@dataclass(slots=True)
class Memory:
    """All turns of one session."""

    turns: dict[str, Turn] = field(default_factory=dict)

    def add(self, turn: Turn) -> None:
        """Remember a turn. Raises LIMIT_EXCEEDED."""
        if len(self.turns) >= MAX_TURNS and turn.key not in self.turns:
            raise OmnifleetError(
                Reason.LIMIT_EXCEEDED, f"a session holds at most {MAX_TURNS} turns", knob="identity.session"
            )
        self.turns[turn.key] = turn

    def prefix(self, messages: Sequence[Plain], history: History, *, explain: bool = True) -> Prefix | None:
        """The longest known beginning of a conversation; None for a conversation that begins here.

        Raises HISTORY_CHANGED, if asked to explain, for one that goes on from a reply of this session over a changed
        history.
        """
        replies = [i for i, message in enumerate(messages) if message.body["role"] == "assistant"]
        for i in reversed(replies):
            key = history.heads[i + 1]
            if key in self.turns:
                chain = self.chain(key)
                ids = [id for turn in chain for id in (*turn.prompt, *turn.reply)]
                return Prefix(i + 1, ids, [ref for turn in chain for ref in turn.media], key)
        for i in replies if explain else ():
            self._explain(i, history)
        return None

    def chain(self, key: str) -> list[Turn]:
        """The turns from the first to `key`."""
        turns: list[Turn] = []
        while key:
            turns.append(self.turns[key])
            key = turns[-1].parent
        return turns[::-1]

    def _explain(self, i: int, history: History) -> None:
        """Raise if messages[i] is a changed reply of a known prompt, or a known reply after a changed prompt."""
        for turn in self.turns.values():
            reply = turn.messages[-1]
            if next_head(history.heads[i], reply) == turn.key:
                raise _changed(f"messages[{i}], a sampled reply, was edited")
            if reply == history.digests[i]:
                known = [digest for t in self.chain(turn.key) for digest in t.messages][:-1]
                raise _changed(_difference(known, history.digests[:i], i))


def _difference(known: list[str], now: list[str], i: int) -> str:
    if len(now) < len(known) and set(now) <= set(known):
        return f"the history was truncated: {len(known) - len(now)} messages before messages[{i}] are missing"
    at = next((k for k, pair in enumerate(zip(known, now, strict=False)) if pair[0] != pair[1]), len(known))
    return f"messages[{at}] was edited or put in"


def message_digest(message: Plain) -> str:
    """Of what a template would show: role, text, media, tool calls. Reasoning is left out, since clients drop it."""
    body, refs = message.body, iter(message.media)
    content: Any = body.get("content") or ""
    if not isinstance(content, str):
        parts: list[Any] = [
            p["text"] if p["type"] == "text" else {"media": next(refs).digest} for p in content
        ]
        content = parts if message.media else "".join(parts)
    calls = [_function(call) for call in body.get("tool_calls") or ()]
    fields = {"role": body["role"], "content": content, "calls": calls, "of": body.get("tool_call_id") or ""}
    return digest_bytes(canonical_json(fields), "message")[:32]


def next_head(head: str, digest: str) -> str:
    """Digest of a history with one more message."""
    return digest_bytes(f"{head}\n{digest}".encode(), "history")[:32]


def _function(call: dict[str, Any]) -> list[Any]:
    return [call["function"]["name"], call["function"].get("arguments", "")]


def _changed(cause: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.HISTORY_CHANGED,
        f"this session cannot go on from its exact tokens: {cause}",
        knob="on_history_change: rerender, or another session",
    )
