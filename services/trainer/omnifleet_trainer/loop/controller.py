"""Asynchronous GRPO. `Controller.run` is the algorithm; synchronous training is the same with a budget of 0."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from omnifleet.config.recipe import EvaluationConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WeightVersion
from omnifleet_trainer.evaluation import Evaluation, HeldOut
from omnifleet_trainer.evaluation.patience import out_of_patience
from omnifleet_trainer.evaluation.pictures import Pictures
from omnifleet_trainer.ledger import Ledger, ReadyGroup
from omnifleet_trainer.loop.admission import Admission
from omnifleet_trainer.loop.batches import Batches
from omnifleet_trainer.loop.buffer import ReadyBuffer
from omnifleet_trainer.loop.failures import first_of
from omnifleet_trainer.loop.journal import Journal, StepRecord, now_ms
from omnifleet_trainer.loop.metrics import sample_metrics, time_metrics, with_aliases
from omnifleet_trainer.loop.prompts import Prompts
from omnifleet_trainer.loop.rollouts import Rollouts
from omnifleet_trainer.loop.stopwatch import Stopwatch
from omnifleet_trainer.loop.turns import Apart, Turns
from omnifleet_trainer.loop.weights import Weights

log = logging.getLogger("omnifleet.trainer")

_DOING = {
    "wait": "waiting for replies",
    "prepare": "preparing",
    "turn": "taking the devices",
    "train": "training",
    "refit": "sending weights",
}
CONTROLS: tuple[Pictures, ...] = ("blank", "shuffled")


class Refits(Protocol):
    """Brings the policy's weights to the fleet."""

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        """Every serving worker gets `version`. Metrics: refit_ms, gate_ms, refit_in_flight, refit_workers, refit_bytes."""
        ...

    async def keep_up(self) -> None:
        """Bring late workers to the version that serves, until cancelled."""
        ...


@dataclass(frozen=True)
class Parts:
    """What the loop is made of. `serving` is told of every version that the fleet has taken.

    checkpoint: returns once it is complete. checkpoint_beside: returns once it has what it needs (None: as the former).
    clock: seconds, for the run's time limit.
    """

    ledger: Ledger
    admission: Admission
    buffer: ReadyBuffer
    prompts: Prompts
    rollouts: Rollouts
    batches: Batches
    weights: Weights
    refits: Refits
    heldout: HeldOut
    journal: Journal
    counters: Counters
    serving: Callable[[WeightVersion], None]
    checkpoint: Callable[[int], Awaitable[Path]]
    media_counters: Callable[[], Awaitable[dict[str, float]]]
    engine_idleness: Callable[[], Awaitable[dict[str, float]]]
    checkpoint_beside: Callable[[int], Awaitable[None]] | None = None
    turns: Turns = field(default_factory=Apart)
    clock: Callable[[], float] = time.monotonic


class Controller:
    """One training run: its loop, and the few things one may ask of it from another task."""

    def __init__(self, parts: Parts, trainer: TrainerConfig, evaluation: EvaluationConfig) -> None:
        self._parts = parts
        self._trainer = trainer
        self._evaluation = evaluation
        self._policy_rests = asyncio.Lock()
        self._stopping = False
        self._checkpoint_at_stop = False
        self._resumes = 0
        self._state, self._doing = "starting", ""
        self._controls: dict[str, float] = {}
        self._began = parts.clock()
        self._steps_here = 0

    # ------------------------------------------------------------------ the algorithm

    async def run(self) -> bool:
        """Train to the last step or to the end of the data. False if somebody stopped it before.

        Raises OmnifleetError for what ends a run: DEADLINE if a step's groups do not come, DISK_FULL, LOGPROBS_MODE,
        what the policy refuses, and a fleet that takes no weights.
        """
        p = self._parts
        try:
            async with _beside(p.refits.keep_up()):
                start = await self._publish()
                if p.journal.heldout(0) is None and p.weights.step == 0:
                    await self._record(start | await self._evaluate())
                self._state = "training"
                async with _beside(p.rollouts.run()):
                    await self._train()
                return await self._end()
        finally:
            self._state = "ended"
            p.journal.close()

    async def _train(self) -> None:
        while self.step < self._trainer.steps and not self._settled():
            watch = Stopwatch(self._began_to)
            with watch.timing("wait"):
                groups = await self._next_groups()
            if groups is None:
                return
            async with self._policy_rests:
                await self._step(groups, watch)

    async def _next_groups(self) -> list[ReadyGroup] | None:
        """Groups of one step; None if the run was stopped or the data ends. A last partial batch is not trained."""
        p = self._parts
        while True:
            resumes = self._resumes
            try:
                groups = await p.buffer.take(
                    p.weights.step,
                    ended=lambda: self._stopping or p.prompts.ended(),
                    paused=lambda: p.admission.paused and not self._stopping,
                    timeout=self._trainer.step_timeout_s,
                )
            except OmnifleetError as error:
                if error.reason is Reason.DEADLINE and (p.admission.paused or self._resumes != resumes):
                    continue  # the time that an operator took is not the fleet's
                raise
            if self._stopping or len(groups) < self._trainer.prompts_per_step:
                return None
            return groups

    async def _step(self, ready: list[ReadyGroup], watch: Stopwatch) -> None:
        p = self._parts
        step, version = p.weights.step + 1, p.weights.step
        queues = self._queue_metrics()
        with watch.timing("prepare"):
            groups = [p.ledger.load_group(group.id) for group in ready]
            batch = await p.batches.build(groups, step=step, version=version)
            p.ledger.consume([group.id for group in ready], step=step, version=version)
            p.admission.trained(len(ready))
        with watch.timing("turn"):
            turned = await p.turns.train()
        with watch.timing("train"):
            trained = await p.weights.on_thread(lambda: p.weights.policy.train(batch))
        p.weights.trained()
        metrics = with_aliases(trained) | sample_metrics(batch, groups) | queues | turned
        with watch.timing("refit"):
            due = step % self._trainer.refit_every == 0
            metrics |= await (self._publish() if due else p.turns.generate())
        metrics |= watch.metrics()
        metrics |= time_metrics(metrics)
        metrics["tokens_per_s"] = metrics["response_tokens"] / metrics["step_s"]
        if self._evaluation_is_due(step):
            metrics |= await self._evaluate()
        await self._record(metrics)
        self._check_time()
        if step % self._trainer.checkpoint_every == 0 and step < self._trainer.steps and not self._stopping:
            self._doing = f"step {step}: copying weights for a checkpoint"
            await (p.checkpoint_beside or p.checkpoint)(step)

    def _check_time(self) -> None:
        """End with a checkpoint if another step might not fit into the time that the run has (reference: must_save_by)."""
        limit, spent = self._trainer.save_by_s, self._parts.clock() - self._began
        self._steps_here += 1
        if limit is not None and not self._stopping and spent + spent / self._steps_here >= limit:
            log.info("%.0f s of trainer.save_by_s = %g are spent: checkpoint, then end", spent, limit)
            self.stop(checkpoint=True)

    async def _publish(self) -> dict[str, float]:
        """Give the fleet the policy's weights; then, and only then, they count for credits and bounds."""
        p = self._parts
        version = p.weights.version
        self._doing = f"step {p.weights.step}: sending weights"
        metrics = await p.turns.refit()
        metrics |= await p.refits.publish(version)
        metrics |= await p.turns.generate()
        p.serving(version)
        p.admission.serving(version.number)
        return metrics

    # ------------------------------------------------------------------ evaluation and the end

    def _evaluation_is_due(self, step: int) -> bool:
        every = self._evaluation.every
        return (every > 0 and step % every == 0) or step == self._trainer.steps

    def _settled(self) -> bool:
        """True if the held-out reward has not moved for as long as the recipe is patient."""
        scores, evaluation = self._parts.journal.values("heldout_reward"), self._evaluation
        return out_of_patience(scores, patience=evaluation.patience, min_gain=evaluation.min_gain)

    async def _evaluate(self) -> dict[str, float]:
        self._doing = f"step {self.step}: scoring held-out prompts"
        result = await self._parts.heldout.score(self._parts.weights.step)
        self._parts.journal.write_samples(result.samples)
        passed = {f"heldout_pass@{k}": rate for k, rate in result.passed.items()}
        return passed | {
            "heldout_reward": result.score,
            "heldout_failed": float(result.failed),
            "heldout_s": result.seconds,
        }

    async def _end(self) -> bool:
        p = self._parts
        self._state = "finishing"
        if self._stopping:
            if self._checkpoint_at_stop:
                self._doing = f"step {self.step}: writing a checkpoint"
                await p.checkpoint(p.weights.step)
            return False
        if p.weights.step == 0:
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"the data ended before one step of {self._trainer.prompts_per_step} groups could be trained: "
                f"{p.ledger.counts().given_up} prompts were given up",
                knob="data.train, trainer.prompts_per_step",
            )
        if p.journal.heldout(p.weights.step) is None:
            p.journal.amend(await self._evaluate())
        if self._evaluation.controls:
            for pictures in CONTROLS:
                self._doing = f"step {self.step}: scoring held-out prompts with {pictures} pictures"
                result: Evaluation = await p.heldout.score(p.weights.step, pictures)
                self._controls[pictures] = result.score
        self._doing = f"step {self.step}: writing the last checkpoint"
        await p.checkpoint(p.weights.step)
        return True

    async def summary(self) -> dict[str, Any]:
        """What the run came to; see docs/api/trainer.md."""
        p = self._parts
        in_flight = p.journal.values("refit_in_flight")
        heldout = p.journal.values("heldout_reward")
        return {
            "steps": p.weights.step,
            "settled": self._settled(),
            "lineage": p.ledger.lineage,
            "heldout_start": heldout[0],
            "heldout_end": heldout[-1],
            "controls": dict(self._controls),
            "refits": len(in_flight),
            "refits_with_requests_in_flight": sum(count > 0 for count in in_flight),
            "tmpe_max": max(p.journal.values("tmpe"), default=None),
            "ledger": ledger_counts(p.ledger),
            "counters": p.counters.snapshot(),
            "media": await p.media_counters(),
        }

    # ------------------------------------------------------------------ what one may ask of a run

    @property
    def state(self) -> str:
        """starting | training | paused | stopping | finishing | ended."""
        if self._state == "training" and self._stopping:
            return "stopping"
        if self._state == "training" and self._parts.admission.paused:
            return "paused"
        return self._state

    @property
    def doing(self) -> str:
        """What the loop does now, in words: "step 3: waiting for replies"; "" before its first refit."""
        return self._doing

    @property
    def step(self) -> int:
        """Steps trained."""
        return self._parts.weights.step

    @property
    def version(self) -> WeightVersion:
        """Weights that the policy holds."""
        return self._parts.weights.version

    def pause(self) -> int:
        """Admit no prompts and train no step after the one in hand. Idempotent. Returns the step."""
        self._parts.admission.pause()
        return self.step

    def resume(self) -> int:
        """Undo `pause`. Idempotent. Returns the step."""
        self._resumes += self._parts.admission.paused
        self._parts.admission.resume()
        self._parts.buffer.changed.fire()
        return self.step

    def stop(self, *, checkpoint: bool) -> int:
        """End after the step in hand, with a checkpoint if asked; no evaluation, no summary. Returns the step."""
        self._stopping = True
        self._checkpoint_at_stop |= checkpoint
        self._parts.buffer.changed.fire()
        return self.step

    async def checkpoint(self, *, timeout: float) -> tuple[Path, int]:
        """Write a checkpoint as soon as the step in hand is done. Raises DEADLINE after `timeout` seconds of waiting."""
        try:
            async with asyncio.timeout(timeout):
                await self._policy_rests.acquire()
        except TimeoutError:
            raise OmnifleetError(
                Reason.DEADLINE,
                f"the step in hand took longer than {timeout:g} s",
                retryable=True,
                knob="deadline_ms",
            ) from None
        try:
            return await self._parts.checkpoint(self.step), self.step
        finally:
            self._policy_rests.release()

    # ------------------------------------------------------------------ records

    async def _record(self, metrics: dict[str, float]) -> None:
        p = self._parts
        media = {f"media_{name}": value for name, value in (await p.media_counters()).items()}
        metrics |= await p.engine_idleness()
        p.journal.write(StepRecord(p.weights.step, p.weights.version, metrics | media, now_ms()))
        log.info("step %d %s", p.weights.step, _line(metrics))

    def _began_to(self, activity: str) -> None:
        step = self.step if activity == "refit" else self.step + 1
        self._doing = f"step {step}: {_DOING[activity]}"

    def _queue_metrics(self) -> dict[str, float]:
        p = self._parts
        return {
            "groups_running": float(p.admission.running),
            "groups_ready": float(p.admission.ready),
            "credits": float(p.admission.capacity()),
            "groups_expired": p.counters.count("groups_expired"),
            "rollout_timeouts": p.counters.count("rollout_timeouts"),
        }


def ledger_counts(ledger: Ledger) -> dict[str, int]:
    """Counts by name."""
    counts = ledger.counts()
    return {name: getattr(counts, name) for name in counts.__dataclass_fields__}


def _line(metrics: dict[str, float]) -> str:
    shown = ("reward", "heldout_reward", "tmpe", "lag_mean", "tokens_per_s", "step_s", "refit_ms")
    return " ".join(f"{name} {metrics[name]:.4g}" for name in shown if name in metrics)


@asynccontextmanager
async def _beside(*coroutines: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """Run coroutines beside the block, and cancel them at its end. The first error of anybody ends all."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
            yield
            for task in tasks:
                task.cancel()
    except* OmnifleetError as errors:
        raise first_of(errors) from None
