"""A question about a clip, judged by the recipe's scorers; a reply without an answer in a box is asked for once more.

Rows come from `omnifleet data prepare-video`, clips travel as digests.
"""

from __future__ import annotations

from omnifleet.environments import Answered, Environment, Outcome, PromptError, Session
from omnifleet.types import MediaKind


class VideoQuestion(Environment):
    """reminders: how often the model is asked again for a boxed answer."""

    def __init__(self, reminders: int = 1) -> None:
        self._reminders = reminders

    async def run(self, session: Session) -> Outcome:
        """The last reply is the answer."""
        task = session.task
        if not any(ref.kind is MediaKind.VIDEO for ref in task.media):
            return PromptError("the row has no clip")
        if task.extra.get("system"):
            session.system(task.extra["system"])
        session.template(**task.extra.get("chat_template_kwargs", {}))
        reply = await session.ask(*task.media, task.text)
        for _ in range(self._reminders):
            if r"\boxed{" in reply.text:
                break
            reply = await session.ask(r"Put your final answer within \boxed{...}.")
        return Answered(reply.text)
