"""The parts of a reward service, put together and taken down again."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omnifleet.config.services import RewardConfig
from omnifleet.telemetry.counters import Counters
from omnifleet_reward.answers import Answers
from omnifleet_reward.network import Endpoints
from omnifleet_reward.pool import Pool
from omnifleet_reward.registry import Registry
from omnifleet_reward.service import RewardService


@asynccontextmanager
async def reward_service(
    config: RewardConfig, counters: Counters, *, run_dir: Path | None = None
) -> AsyncIterator[RewardService]:
    """A service that scores. What other services answer is kept in `config.answers`, else in `run_dir`, else in memory.

    Raises INVALID_CONFIG (modules, answers file), INTERNAL (processes do not start).
    """
    path = config.answers or (run_dir / "answers.sqlite" if run_dir else None)
    answers = Answers(path if config.endpoints else None, config.answers_kept)
    registry = Registry(config.modules)
    async with Pool(config, counters) as pool, Endpoints(config, answers, counters) as network:
        yield RewardService(config, registry, pool, network, counters)
