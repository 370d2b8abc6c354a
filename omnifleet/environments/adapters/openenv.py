"""OpenEnv: environments behind a server, played over its WebSocket: `reset`, then a `step` for every reply of the model.

Speaks the protocol itself, as OpenEnv's generic client does: OpenEnv need not be installed here, the `websockets` package must be.
"""

from __future__ import annotations

import base64
import binascii
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import WebSocketException

from omnifleet.environments.environment import Environment
from omnifleet.environments.outcome import Outcome, Scored
from omnifleet.environments.session import Part, Session
from omnifleet.environments.task import Task
from omnifleet.errors import Reason, invalid, retryable

_FRAME_BYTES = 32 << 20


class OpenEnv(Environment):
    """One WebSocket session an episode. Its reward is the sum of the rewards of its steps."""

    def __init__(
        self,
        server: str,
        prompt: str,
        action: str = "message",
        show: str = "",
        picture: str = "",
        steps: int = 8,
    ) -> None:
        """server: http address. prompt: what the model is told first; `{}` in it stands for the first observation.

        action: field of the action that the reply's text becomes. show: field of the observation that the model sees,
        default is all of it as JSON. picture: field with a picture in base64. steps: at most, as the server may go on for ever.
        """
        if not server.startswith(("http://", "https://")):
            raise ValueError("server is an http address")
        self._url = f"ws{server.removeprefix('http').rstrip('/')}/ws"
        self._prompt, self._action, self._show, self._picture = prompt, action, show, picture
        self._steps = steps

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """Every task is another seed of `reset`; `size` None = 256."""
        first = random.Random(f"{seed}/{split}").getrandbits(30)
        return [Task(str(at), self._prompt, extra={"seed": first + at}) for at in range(size or 256)]

    async def run(self, session: Session) -> Outcome:
        """Until the server says `done`, or the steps are used up."""
        try:
            async with connect(self._url, max_size=_FRAME_BYTES, proxy=None) as socket:
                return await self._play(session, socket)
        except (OSError, WebSocketException) as error:
            kind = type(error).__name__
            raise retryable(Reason.UNAVAILABLE, f"OpenEnv at {self._url}: {kind}: {error}") from error

    async def _play(self, session: Session, socket: ClientConnection) -> Outcome:
        said = await _ask(socket, "reset", {"seed": int(session.task.extra.get("seed", session.seed))})
        prompt = self._prompt if "{}" in self._prompt else f"{self._prompt}\n{{}}"
        text = prompt.replace("{}", self._text(said))
        reward, steps = 0.0, 0
        while not said.get("done") and steps < self._steps:
            reply = await session.ask(*self._pictures(said), text)
            said = await _ask(socket, "step", {self._action: reply.text})
            reward, steps = reward + float(said.get("reward") or 0.0), steps + 1
            text = self._text(said)
        return Scored(reward, {"steps": float(steps), "done": float(bool(said.get("done")))})

    def _text(self, said: Mapping[str, Any]) -> str:
        seen = {k: v for k, v in said["observation"].items() if k not in (self._picture, "metadata")}
        if not self._show:
            return json.dumps(seen, ensure_ascii=False)
        value = seen.get(self._show)
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)

    def _pictures(self, said: Mapping[str, Any]) -> list[Part]:
        data = said["observation"].get(self._picture) if self._picture else None
        if not data:
            return []
        try:
            return [base64.b64decode(data, validate=True)]
        except (binascii.Error, TypeError) as error:
            raise ValueError(f"observation.{self._picture} is no base64: {error}") from error


async def _ask(socket: ClientConnection, kind: str, data: Mapping[str, Any]) -> dict[str, Any]:
    """One message and its answer.

    Raises OVERLOADED if the server has no room for a session, INVALID_REQUEST for an action that it does not take, RuntimeError
    for what its environment raises.
    """
    await socket.send(json.dumps({"type": kind, "data": data}))
    answer = json.loads(await socket.recv())
    told = answer.get("data") or {}
    if answer.get("type") == "observation" and isinstance(told.get("observation"), dict):
        found: dict[str, Any] = told
        return found
    if told.get("code") == "CAPACITY_REACHED":
        raise retryable(Reason.OVERLOADED, f"OpenEnv: {told.get('message')}", knob="environments.episodes")
    if told.get("code") == "VALIDATION_ERROR":
        raise invalid(
            f"OpenEnv refuses the {kind}: {told.get('errors')}"[:500], knob="data.train.params.action"
        )
    raise RuntimeError(f"OpenEnv: {str(answer)[:500]}")
