"""Play an environment with scripted replies: no gateway, no model. For an environment's own tests."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from typing import Any

from omnifleet.address import digest_bytes, token_digest
from omnifleet.environments.environment import Environment
from omnifleet.environments.episode import Turn
from omnifleet.environments.outcome import Outcome
from omnifleet.environments.session import Session
from omnifleet.environments.task import Task
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import FinishReason, LogprobsMode, MediaKind, MediaRef, VersionSpan, WeightVersion

Said = str | Mapping[str, Any]
"""A reply: its text, or the arguments of one tool call as {"name": ..., "arguments": {...}}."""


def rehearse(
    environment: Environment, task: Task, replies: Sequence[Said], *, seed: int = 0
) -> tuple[Outcome, list[dict[str, Any]]]:
    """The outcome, and the messages as the model would have seen them; a task's pictures become references.

    Raises what the environment raises, and UNAVAILABLE if it asks for more than `replies`.
    """
    placed = tuple(MediaRef(MediaKind.IMAGE, digest_bytes(picture, "rehearsal")) for picture in task.pictures)
    talk = _Script(replies)
    seen = Task(task.id, task.text, task.answer, extra=task.extra, media=(*placed, *task.media))
    outcome = asyncio.run(environment.run(Session(seen, talk, seed=seed)))
    return outcome, talk.messages


class _Script:
    """A `Talk` that says what it was given; one made-up token a reply."""

    def __init__(self, replies: Sequence[Said]) -> None:
        self._replies = list(replies)
        self._known = [0]
        self.messages: list[dict[str, Any]] = []

    async def say(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        max_tokens: int | None,
        template: Mapping[str, Any],
    ) -> tuple[dict[str, Any], Turn]:
        """The next reply of the script."""
        if not self._replies:
            raise OmnifleetError(Reason.UNAVAILABLE, f"the script has no reply to {messages[-1]!r}")
        message = _message(self._replies.pop(0))
        self.messages = [dict(said) for said in messages] + [message]
        prompt, self._known = self._known, [*self._known, 1, 0]
        span = VersionSpan(WeightVersion("rehearsal", "script", 0), 0, 1)
        turn = Turn(
            prompt_token_ids=prompt,
            prompt_hash=token_digest(prompt),
            media=_media(messages),
            token_ids=[1],
            logprobs=[0.0],
            spans=[span],
            finish_reason=FinishReason.STOP,
            logprobs_mode=LogprobsMode.PROCESSED,
            text=str(message["content"] or ""),
        )
        return message, turn

    def terms(self) -> dict[str, Any]:
        """Nothing: a script is not asked by others."""
        return {}


def _message(said: Said) -> dict[str, Any]:
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    function = {"name": said["name"], "arguments": json.dumps(said["arguments"])}
    call = {"id": "call", "type": "function", "function": function}
    return {"role": "assistant", "content": None, "tool_calls": [call]}


def _media(messages: Sequence[Mapping[str, Any]]) -> tuple[MediaRef, ...]:
    """References of all media parts, in order; bytes get the digest of their source."""
    found = []
    for message in messages:
        for part in message["content"] if isinstance(message.get("content"), list) else ():
            if part["type"] != "text":
                url = part[part["type"]]["url"]
                kind = MediaKind(part["type"].removesuffix("_url"))
                known = url.startswith("media://")
                digest = url.removeprefix("media://") if known else digest_bytes(url.encode(), "rehearsal")
                found.append(MediaRef(kind, digest))
    return tuple(found)
