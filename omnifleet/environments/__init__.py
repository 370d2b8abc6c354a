"""Gyms: write `Environment.run(session) -> Outcome`, name the class in a recipe, train on it. docs/environments.md is the page.

`session` speaks to the gateway and keeps every token's origin; `play` runs one episode, `pool` many of them in processes of
their own. `endpoint` is for agents that ask by themselves, `adapters` for gyms of others. The room knows HTTP and tokens. It must
not know torch, the training loop or any service's inside.
"""

from omnifleet.environments.environment import Environment, load_environment
from omnifleet.environments.episode import Episode, Turn
from omnifleet.environments.outcome import Answered, Crashed, Lost, Outcome, PromptError, Scored, TimedOut
from omnifleet.environments.rehearse import rehearse
from omnifleet.environments.session import Reply, Session, ToolCall
from omnifleet.environments.task import Task

__all__ = [
    "Answered",
    "Crashed",
    "Environment",
    "Episode",
    "Lost",
    "Outcome",
    "PromptError",
    "Reply",
    "Scored",
    "Session",
    "Task",
    "TimedOut",
    "ToolCall",
    "Turn",
    "load_environment",
    "rehearse",
]
