"""From a recipe to a player with its pool of processes."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from omnifleet.auth import Scope, Tokens
from omnifleet.client.media import MediaClient
from omnifleet.config.recipe import Recipe
from omnifleet.environments.pool import Cast, Pool
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.processor import read_sound_processor, read_video_processor
from omnifleet.service import read_records
from omnifleet.telemetry.counters import Counters
from omnifleet.wire import media_pb2
from omnifleet_trainer.batch.extras import Replay
from omnifleet_trainer.environments.player import Player
from omnifleet_trainer.loop.prompting import Asker, Prompter
from omnifleet_trainer.rendering import Renderer


@asynccontextmanager
async def open_player(
    recipe: Recipe,
    run_dir: Path,
    tokens: Tokens,
    prompter: Prompter,
    renderer: Renderer,
    media: MediaClient,
    counters: Counters,
) -> AsyncIterator[Asker]:
    """A player for the sets that have environments, the prompter itself if none has. Stops its processes on exit.

    Raises INVALID_CONFIG for an environment that cannot be loaded, UNAVAILABLE if no gateway is known.
    """
    sets = [s for s in (*recipe.data.train_sets, *recipe.data.heldout_sets) if s.environment]
    if not sets:
        yield prompter
        return
    settings, trainer = recipe.environments, recipe.trainer
    cast = Cast(
        {split.task_name: (split.environment, split.params) for split in sets},
        settings.gateway or _gateway(run_dir),
        tokens.secret(Scope.ENV),
    )
    async with Pool(
        cast, processes=settings.processes, episodes=settings.episodes, hang_s=settings.hang_s
    ) as pool:
        counters.gauge("episodes", lambda: float(pool.counts.episodes))
        counters.gauge("environment_restarts", lambda: float(pool.counts.restarts))
        yield Player(
            pool,
            cast.environments,
            prompter,
            renderer,
            media,
            mode=recipe.rollout.logprobs_mode,
            timeout_s=settings.timeout_s,
            lease_s=trainer.rollout_timeout_s + 2 * trainer.step_timeout_s,
            max_tokens=trainer.micro_batch_tokens,
            clips=_clips(recipe),
            sounds=_sounds(recipe),
            replay=Replay.of(recipe),
        )


def _clips(recipe: Recipe) -> media_pb2.DecodeContract:
    """As the gateway samples clips that come as a URL, so that equal clips are equal content."""
    gateway = recipe.gateway
    try:
        patch = read_video_processor(Path(recipe.model.path)).temporal_patch
    except OmnifleetError:
        patch = 0  # it takes no clips anyway
    return media_pb2.DecodeContract(
        sampling=gateway.clip_sampling,
        num_frames=gateway.clip_frames,
        fps=gateway.clip_fps,
        temporal_patch=patch,
    )


def _sounds(recipe: Recipe) -> media_pb2.DecodeContract | None:
    """At the rate that the model hears, as the gateway has sounds decoded."""
    try:
        rate = read_sound_processor(Path(recipe.model.path)).config["sampling_rate"]
    except OmnifleetError:
        return None  # it hears none anyway
    return media_pb2.DecodeContract(sampling="audio@1", sample_rate=rate)


def _gateway(run_dir: Path) -> str:
    record = read_records(run_dir).get("gateway")
    if record is None or not record.http:
        raise retryable(Reason.UNAVAILABLE, f"no gateway is up in {run_dir}", knob="environments.gateway")
    return f"http://{record.http}"
