"""One episode from its order to its end, in the process that calls."""

from __future__ import annotations

import asyncio
import traceback
from dataclasses import dataclass

import httpx

from omnifleet.environments.environment import Environment
from omnifleet.environments.episode import Episode
from omnifleet.environments.gateway import GatewayTalk
from omnifleet.environments.outcome import Answered, Crashed, Lost, Outcome, PromptError, Scored, TimedOut
from omnifleet.environments.session import Session
from omnifleet.environments.task import Task
from omnifleet.errors import OmnifleetError
from omnifleet.types import Identity, Sampling, VersionBound


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be played. environment: by the name that the pool knows. timeout_s: life of the episode, seconds.

    sampling: of each reply, one at a time. dice: seed of the environment, see `Session.seed`. extras: what engines must return
    beside tokens, "routed_experts" and "sampling_mask".
    """

    environment: str
    task: Task
    identity: Identity
    sampling: Sampling
    bound: VersionBound
    timeout_s: float
    dice: int = 0
    extras: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Played:
    """How an episode ended. episode: present if it comes to a reward."""

    outcome: Outcome
    episode: Episode | None = None


async def play(environment: Environment, order: Order, http: httpx.AsyncClient) -> Played:
    """Run an episode to one of its outcomes. Only cancellation is raised."""
    end = asyncio.get_running_loop().time() + order.timeout_s
    talk = GatewayTalk(http, order.identity, order.sampling, order.bound, end=end, extras=order.extras)
    session = Session(order.task, talk, seed=order.dice)
    clock = asyncio.timeout_at(end)
    try:
        async with clock:
            outcome = await environment.run(session)
        if isinstance(outcome, PromptError | Crashed):
            return Played(outcome)
        if not isinstance(outcome, Scored | Answered):
            said = type(outcome).__name__
            return Played(Crashed(f"run returned {said}, not Scored, Answered or PromptError"))
        episode = session.episode()
        if episode is None:
            return Played(Crashed("run ended without asking the model anything"))
        return Played(outcome, episode)
    except OmnifleetError as error:
        return Played(Lost(error))
    except TimeoutError as error:
        return Played(TimedOut(order.timeout_s) if clock.expired() else Crashed(_said(error)))
    except Exception as error:  # noqa: BLE001 - an environment may raise anything; the outcome says what
        return Played(Crashed(_said(error)))


def _said(error: Exception) -> str:
    where = traceback.extract_tb(error.__traceback__)[-1:]
    at = f" at {where[0].filename}:{where[0].lineno}" if where else ""
    return f"{type(error).__name__}: {error}{at}"[:2000]
