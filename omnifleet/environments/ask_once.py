"""The environment of rows with clips or sounds: one question, one reply, judged by the recipe's scorers."""

from __future__ import annotations

from omnifleet.environments.environment import Environment
from omnifleet.environments.outcome import Answered, Outcome
from omnifleet.environments.session import Session


class AskOnce(Environment):
    """A row's `system` and `chat_template_kwargs` are honoured."""

    async def run(self, session: Session) -> Outcome:
        """Media first, then the text."""
        if session.task.extra.get("system"):
            session.system(str(session.task.extra["system"]))
        session.template(**session.task.extra.get("chat_template_kwargs", {}))
        reply = await session.ask(*session.task.media, session.task.text)
        return Answered(reply.text)
