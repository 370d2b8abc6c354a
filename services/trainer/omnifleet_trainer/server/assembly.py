"""A recipe and three addresses to a loop that is ready to run."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from omnifleet.auth import Scope, Tokens
from omnifleet.client.fleet import FleetClient
from omnifleet.client.media import MediaClient
from omnifleet.client.reward import RewardClient
from omnifleet.client.rollout import RolloutClient
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError
from omnifleet.processor import (
    image_token_id,
    picture_brackets,
    read_image_processor,
)
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WeightVersion
from omnifleet_trainer.batch.extras import Replay
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.environments import open_player
from omnifleet_trainer.evaluation import HeldOut
from omnifleet_trainer.loop.admission import Admission
from omnifleet_trainer.loop.batches import AdvantageRule, Batches
from omnifleet_trainer.loop.buffer import ReadyBuffer
from omnifleet_trainer.loop.controller import Controller, Parts
from omnifleet_trainer.loop.journal import Journal
from omnifleet_trainer.loop.prompting import Prompter
from omnifleet_trainer.loop.prompts import Prompts
from omnifleet_trainer.loop.rollouts import Rollouts
from omnifleet_trainer.loop.samplers import SAMPLERS
from omnifleet_trainer.loop.start import Start
from omnifleet_trainer.loop.turns import Apart, Turns
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.objectives.rewards import reachable
from omnifleet_trainer.refit.open import open_guard, open_sender
from omnifleet_trainer.refit.sender import RefitSender
from omnifleet_trainer.rendering import Renderer, load_template
from omnifleet_trainer.server.checkpoints import Checkpoints
from omnifleet_trainer.server.elsewhere import EngineIdleness, MediaCounters
from omnifleet_trainer.server.refits import FleetRefits
from omnifleet_trainer.server.settings import (
    clips_of,
    dynamic_sampling,
    load_data,
    own_scorers,
    room,
    sampling_of,
    sounds_of,
)
from omnifleet_trainer.server.turns import SharedDevices
from omnifleet_trainer.sinks.build import open_sinks
from omnifleet_trainer.sinks.feeding import feeding

log = logging.getLogger("omnifleet.trainer")

_AT_ONCE = 32  # held-out requests that are open at once


@dataclass(frozen=True, slots=True)
class Addresses:
    """gRPC addresses of the other services, "host:port"."""

    media: str
    gateway: str
    reward: str


@dataclass(frozen=True, slots=True)
class Run:
    """A loop and what is served beside it. facts: of the policy."""

    controller: Controller
    journal: Journal
    facts: dict[str, str]


class Served:
    """The weights that the fleet has taken last."""

    def __init__(self, version: WeightVersion) -> None:
        self.version = version

    def set(self, version: WeightVersion) -> None:
        """The fleet has `version` now."""
        self.version = version

    def get(self) -> WeightVersion:
        """What it has."""
        return self.version


async def _canary(weights: Weights, batch: StepBatch) -> list[float]:
    """The policy's logprobs of one sample."""
    (logprobs,) = await weights.on_thread(lambda: weights.policy.logprobs(batch))
    return [float(value) for value in logprobs]


@asynccontextmanager
async def assembled(
    recipe: Recipe, run_dir: Path, start: Start, addresses: Addresses, tokens: Tokens, counters: Counters
) -> AsyncIterator[Run]:
    """Open clients, policy and data, and join them. Everything is closed on exit.

    Raises OmnifleetError: INVALID_CONFIG, MODEL_MISSING, CORRUPT, UNAVAILABLE, CONTRACT_MISMATCH.
    """
    trainer, name, model = recipe.trainer, recipe.run.name, Path(recipe.model.path)
    secret = tokens.secret(Scope.TRAINER)
    train_rows, heldout_rows = await asyncio.to_thread(load_data, recipe)
    async with AsyncExitStack() as stack:
        media = await stack.enter_async_context(MediaClient.open(addresses.media, secret, name="trainer"))
        rollout = await stack.enter_async_context(RolloutClient.open(addresses.gateway, secret))
        fleet = await stack.enter_async_context(FleetClient.open(addresses.gateway, secret))
        reward = await stack.enter_async_context(RewardClient.open(addresses.reward, secret, name="trainer"))
        sender = await stack.enter_async_context(
            open_sender(
                recipe.refit,
                addresses.gateway,
                secret,
                run=name,
                lineage=start.lineage,
                in_flight=recipe.rollout.kv_after_refit,
                timeout_s=trainer.refit_timeout_s,
                # Bounds on each request hold the staleness; this only says from when on a silent worker is fenced.
                max_lag=max(trainer.max_staleness, trainer.refit_every),
            )
        )
        turns = await stack.enter_async_context(_turns(recipe, addresses, secret, sender, counters))
        weights = await _open_weights(recipe, model, run_dir, start)
        stack.callback(weights.close)
        if isinstance(turns, SharedDevices):
            turns.give(weights)
        sender.guard = open_guard(recipe.refit, secret, lambda batch: _canary(weights, batch))

        served = Served(WeightVersion(name, start.lineage, start.step))
        template = load_template(model, trust_remote_code=recipe.model.trust_remote_code)
        renderer = Renderer(
            template,
            media,
            read_image_processor(model),
            placeholder=image_token_id(model),
            run=name,
            max_prompt_tokens=recipe.longest_prompt,
            clips=clips_of(model, recipe.rollout.engine.clips),
            sounds=sounds_of(model),
            brackets=picture_brackets(model),
        )
        prompter = Prompter(
            renderer,
            rollout,
            reward,
            scorers=recipe.reward,
            scorers_of=own_scorers(recipe),
            mode=recipe.rollout.logprobs_mode,
            timeout_s=trainer.rollout_timeout_s,
            replay=Replay.of(recipe),
        )
        asker = await stack.enter_async_context(
            open_player(recipe, run_dir, tokens, prompter, renderer, media, counters)
        )
        ledger = start.ledger
        admission = Admission(
            bound=trainer.max_staleness,
            batch=trainer.prompts_per_step,
            buffer=room(recipe),
            version=start.step,
            # A step is prompts_per_step groups even if an earlier life of the run had another size.
            trained=start.step * trainer.prompts_per_step,
            ready=len(ledger.ready()),
            at_once=trainer.groups_at_once,
        )
        buffer = ReadyBuffer(
            ledger,
            admission,
            SAMPLERS[trainer.sampler],
            needed=trainer.prompts_per_step,
            max_staleness=trainer.max_staleness,
            counters=counters,
        )
        prompts = Prompts(train_rows, ledger, seed=recipe.run.seed, max_epochs=recipe.data.max_epochs)
        sampling = sampling_of(recipe, template)
        rollouts = Rollouts(
            prompts,
            asker,
            buffer,
            admission,
            counters,
            serving=served.get,
            sampling=sampling,
            max_staleness=trainer.max_staleness,
            attempts_per_prompt=trainer.attempts_per_prompt,
            timeout_s=trainer.rollout_timeout_s,
            seed=recipe.run.seed,
            **dynamic_sampling(recipe),
        )
        journal = Journal(run_dir, step=start.step)
        sinks = await asyncio.to_thread(open_sinks, recipe, run_dir, counters)
        await stack.enter_async_context(
            feeding(
                journal,
                sinks,
                after=start.step or -1,
                pictures=run_dir / "mismatch",
                counters=counters,
            )
        )
        checkpoints = Checkpoints(recipe, run_dir / "checkpoints", ledger, weights, journal.latest)
        stack.push_async_callback(checkpoints.close)
        parts = Parts(
            ledger=ledger,
            admission=admission,
            buffer=buffer,
            prompts=prompts,
            rollouts=rollouts,
            batches=Batches(prompts, renderer, AdvantageRule(recipe.objective), Replay.of(recipe)),
            weights=weights,
            refits=FleetRefits(sender, weights),
            heldout=HeldOut(
                heldout_rows,
                asker,
                serving=served.get,
                sampling=sampling,
                at_once=_AT_ONCE,
                generations=recipe.evaluation.generations,
                pass_at=recipe.evaluation.pass_at,
                pass_reward=recipe.evaluation.pass_reward,
            ),
            journal=journal,
            counters=counters,
            serving=served.set,
            checkpoint=checkpoints.write,
            checkpoint_beside=checkpoints.begin,
            turns=turns,
            media_counters=MediaCounters(media).read,
            engine_idleness=EngineIdleness(fleet, recipe.rollout.pool).read,
        )
        counters.gauge("step", lambda: float(weights.step))
        counters.gauge("groups_running", lambda: float(admission.running))
        counters.gauge("groups_waiting", lambda: float(admission.ready))
        facts = weights.policy.describe() | await _reachable(recipe, reward, template.opened())
        yield Run(Controller(parts, trainer, recipe.evaluation), journal, facts)


@asynccontextmanager
async def _turns(
    recipe: Recipe, addresses: Addresses, secret: str, sender: RefitSender, counters: Counters
) -> AsyncIterator[Turns]:
    """With shared devices the engines are up and asleep when this returns: the policy may be opened."""
    level, trainer = recipe.rollout.sleep_level, recipe.trainer
    if level is None:
        yield Apart()
        return
    async with SharedDevices.open(
        addresses.gateway,
        secret,
        sender,
        counters,
        level=level,
        timeout_s=trainer.turn_timeout_s,
        pool=recipe.rollout.pool,
    ) as turns:
        await turns.begin(recipe.rollout.workers, timeout_s=trainer.step_timeout_s)
        yield turns


async def _open_weights(recipe: Recipe, model: Path, run_dir: Path, start: Start) -> Weights:
    """Build the policy on its own thread and load the checkpoint that the run goes on from."""
    from omnifleet_trainer.policy.build import open_policy

    weights = await Weights.open(
        lambda: open_policy(recipe, model, run_dir=run_dir),
        run=recipe.run.name,
        lineage=start.lineage,
        step=start.step,
    )
    if start.checkpoint is not None:
        folder = start.checkpoint
        try:
            await weights.on_thread(lambda: weights.policy.load(folder))
        except BaseException:
            weights.close()
            raise
    return weights


async def _reachable(recipe: Recipe, reward: RewardClient, opened: str) -> dict[str, str]:
    """The largest reward that the recipe's scorers and objective can give; says so where that is not known."""
    try:
        found = await reward.reachable_maximum(recipe.reward, prompt_suffix=opened)
    except OmnifleetError as error:
        log.warning("the reachable maximum of the reward is not known: %s", error)
        return {}
    largest = reachable(found.maximum, recipe.objective)
    log.info("the reward reaches at most %.4g (e.g. %r)", largest, found.example)
    return {"reward_reachable": f"{largest:.4g}"}
