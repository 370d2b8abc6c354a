"""A whole training run in one process: fake services and a fake policy around the real loop and the real ledger."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from omnifleet.address import digest_bytes, source_digest, token_digest
from omnifleet.client.media import Segment
from omnifleet.client.reward import ItemScore, ScoreItem
from omnifleet.config.recipe import EvaluationConfig, ObjectiveConfig, TrainerConfig
from omnifleet.processor import ImageProcessorSpec
from omnifleet.prompt import expand_placeholders
from omnifleet.telemetry.counters import Counters
from omnifleet.types import (
    FinishReason,
    Generation,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Sample,
    Sampling,
    VersionBound,
    VersionSpan,
    WeightVersion,
)
from omnifleet_trainer.batch.extras import NO_REPLAY, Replay
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.evaluation import HeldOut
from omnifleet_trainer.ledger import SqliteLedger
from omnifleet_trainer.loop.admission import Admission
from omnifleet_trainer.loop.batches import AdvantageRule, Batches
from omnifleet_trainer.loop.buffer import ReadyBuffer, check_buffer
from omnifleet_trainer.loop.controller import Controller, Parts
from omnifleet_trainer.loop.journal import Journal
from omnifleet_trainer.loop.prompting import Prompter
from omnifleet_trainer.loop.prompts import Prompts
from omnifleet_trainer.loop.rollouts import Rollouts
from omnifleet_trainer.loop.samplers import SAMPLERS
from omnifleet_trainer.loop.turns import Apart, Turns
from omnifleet_trainer.loop.weights import Weights
from omnifleet_trainer.rendering import Renderer

IMAGE = 9
FEATURES = 4


@dataclass(frozen=True)
class Row:
    """A prompt row as datasets give them."""

    prompt_id: str
    text: str
    images: tuple[bytes, ...]
    answer: str
    task: str = "count"
    extra: dict[str, Any] = field(default_factory=dict)
    clips: tuple[str, ...] = ()
    sounds: tuple[str, ...] = ()


def rows(n: int) -> list[Row]:
    return [Row(f"p{i}", f"how many {i}?", (bytes([i // 2]) * 8,), str(i)) for i in range(n)]


class FakeTemplate:
    """Ids of a prompt: one image token a picture, then one id a character."""

    def render(self, text: str, pictures: int) -> list[int]:
        return [IMAGE] * pictures + [100 + ord(c) % 100 for c in text]

    def opened(self) -> str:
        return ""


class FakePictures:
    """The media service: remembers what was put, loses what it is told to lose."""

    def __init__(self) -> None:
        self.puts = 0

    async def put_image(self, data: bytes, run: str) -> MediaRef:
        self.puts += 1
        return MediaRef(MediaKind.IMAGE, source_digest(data))

    async def segment(self, ref: MediaRef, spec: ImageProcessorSpec, run: str) -> Segment:
        key = digest_bytes(ref.digest.encode(), "segment")
        tensors = {"pixel_values": np.zeros((FEATURES, 2), np.float32)}
        return Segment(key, key, FEATURES, (1, 2, 2), tensors, 32, False)


Behaviour = Callable[[Identity, Generation], Awaitable[None]]


class FakeRollout:
    """The gateway and its fleet. `behave` may wait, raise, or change a generation before it is answered."""

    def __init__(self) -> None:
        self.version = WeightVersion("run", "none", 0)
        self.calls: list[Identity] = []
        self.in_flight = 0
        self.behave: Behaviour | None = None
        self.extras: tuple[str, ...] = ()

    async def generate(
        self,
        *,
        prompt_token_ids: Sequence[int],
        media: Sequence[MediaRef] = (),
        sampling: Sampling,
        identity: Identity,
        bound: VersionBound = VersionBound(),
        logprobs_mode: LogprobsMode | None = None,
        deadline_s: float,
        return_text: bool = False,
        extras: Sequence[str] = (),
    ) -> Generation:
        self.calls.append(identity)
        self.in_flight += 1
        try:
            began = self.version
            await asyncio.sleep(0)
            assert bound.admits(self.version)
            self.extras = tuple(extras) or self.extras
            expanded = expand_placeholders(prompt_token_ids, IMAGE, [FEATURES] * len(media))
            spans = [VersionSpan(began, 0, 1, "worker-0"), VersionSpan(self.version, 1, 3, "worker-0")]
            samples = {
                i: Sample(i, [5, 6, i], [-0.5, -0.25, -1.0], list(spans), f"answer {i}", FinishReason.STOP)
                for i in range(sampling.n)
            }
            mode = logprobs_mode or LogprobsMode.PROCESSED
            answer = Generation("r", token_digest(expanded), expanded, mode, "worker-0", samples, {})
            if self.behave is not None and identity.environment != "heldout":
                await self.behave(identity, answer)
            return answer
        finally:
            self.in_flight -= 1


class FakeReward:
    """The reward service: sample i of a group gets i / 10; `behave` may change the scores or raise."""

    def __init__(self) -> None:
        self.behave: Callable[[list[ItemScore]], list[ItemScore]] | None = None

    async def score(
        self, items: Sequence[ScoreItem], scorers: Sequence[Any], deadline_s: float
    ) -> list[ItemScore]:
        scores = [
            ItemScore(item.id, int(item.id.rpartition("/")[2]) / 10, None, {"exact@1": 0.5}, None, "exact@1")
            for item in items
        ]
        return self.behave(scores) if self.behave else scores


class FakePolicy:
    """Counts steps; remembers what it was trained on."""

    encoder_trains = False

    def __init__(self) -> None:
        self.trained: list[StepBatch] = []
        self.closed = False

    def train(self, batch: StepBatch) -> dict[str, float]:
        self.trained.append(batch)
        return {"token_mult_prob_error": 1.0, "loss": 0.0}

    def close(self) -> None:
        self.closed = True


class FakeRefits:
    """Moves the fleet to a version at once."""

    def __init__(self, rollout: FakeRollout) -> None:
        self._rollout = rollout

    async def publish(self, version: WeightVersion) -> dict[str, float]:
        in_flight = self._rollout.in_flight
        await asyncio.sleep(0)
        self._rollout.version = version
        return {"refit_ms": 1.0, "gate_ms": 1.0, "refit_in_flight": float(in_flight)}

    async def keep_up(self) -> None:
        await asyncio.Event().wait()


@dataclass
class World:
    """One life of a run. `checkpoints` are the steps at which one was written."""

    controller: Controller
    ledger: SqliteLedger
    admission: Admission
    buffer: ReadyBuffer
    rollout: FakeRollout
    reward: FakeReward
    pictures: FakePictures
    policy: FakePolicy
    journal: Journal
    counters: Counters
    prompts: Prompts
    batches: Batches
    checkpoints: list[int] = field(default_factory=list)

    def trained_prompts(self) -> list[list[str]]:
        """Prompt ids of each trained step, a prompt once."""
        names = {row.id: row.prompt_id for row in self._groups()}
        return [
            list(dict.fromkeys(names[s.group_id] for s in batch.samples)) for batch in self.policy.trained
        ]

    def _groups(self) -> list[Any]:
        ids = {s.group_id for batch in self.policy.trained for s in batch.samples}
        return [self.ledger.load_group(i) for i in ids]


@contextmanager
def world(
    folder: Path,
    *,
    data: Sequence[Row] | None = None,
    resume_at: int = 0,
    evaluation: EvaluationConfig = EvaluationConfig(size=1),
    max_epochs: int = 1000,
    seed: int = 0,
    clock: Callable[[], float] = time.monotonic,
    replay: Replay = NO_REPLAY,
    turns: Callable[[FakeRollout], Turns] = lambda rollout: Apart(),
    **trainer: Any,
) -> Iterator[World]:
    """Open a run in `folder`, at a checkpoint of step `resume_at`. `trainer`: settings of TrainerConfig."""
    settings: dict[str, Any] = {
        "steps": 3,
        "prompts_per_step": 2,
        "generations_per_prompt": 2,
        "rollout_timeout_s": 5.0,
        "step_timeout_s": 20.0,
    }
    config = TrainerConfig(**(settings | trainer))
    data = data if data is not None else rows(12)
    ledger = SqliteLedger(folder / "ledger.sqlite", owner="test")
    lineages = sum(1 for _ in folder.glob("life-*"))
    (folder / f"life-{lineages}").touch()
    lineage = ledger.roll_back_to(resume_at, f"lineage-{lineages}").lineage
    counters = Counters("trainer")
    rollout, reward, pictures, policy = FakeRollout(), FakeReward(), FakePictures(), FakePolicy()
    batch = config.prompts_per_step
    room = config.buffer_groups or (config.max_staleness + 1) * batch
    check_buffer(room, batch)
    admission = Admission(
        bound=config.max_staleness,
        batch=batch,
        buffer=room,
        version=resume_at,
        trained=resume_at * batch,
        ready=len(ledger.ready()),
    )
    buffer = ReadyBuffer(
        ledger,
        admission,
        SAMPLERS[config.sampler],
        needed=batch,
        max_staleness=config.max_staleness,
        counters=counters,
    )
    prompts = Prompts(data, ledger, seed=seed, max_epochs=max_epochs)
    renderer = Renderer(
        FakeTemplate(),
        pictures,
        ImageProcessorSpec("Fake", {}),
        placeholder=IMAGE,
        run="run",
        max_prompt_tokens=100,
    )
    prompter = Prompter(
        renderer,
        rollout,
        reward,
        scorers=(),
        mode=LogprobsMode.PROCESSED,
        timeout_s=config.rollout_timeout_s,
        replay=replay,
    )
    weights = Weights(policy, run="run", lineage=lineage, step=resume_at)
    sampling = Sampling(n=config.generations_per_prompt, max_tokens=8)
    journal = Journal(folder, step=resume_at)
    checkpoints: list[int] = []

    async def checkpoint(step: int) -> Path:
        checkpoints.append(step)
        return folder

    async def media_counters() -> dict[str, float]:
        return {"puts": float(pictures.puts)}

    async def engine_idleness() -> dict[str, float]:
        return {"engine_idle_share": 0.25}

    def serving() -> WeightVersion:
        return rollout.version

    rollouts = Rollouts(
        prompts,
        prompter,
        buffer,
        admission,
        counters,
        serving=serving,
        sampling=sampling,
        max_staleness=config.max_staleness,
        attempts_per_prompt=config.attempts_per_prompt,
        timeout_s=config.rollout_timeout_s,
        seed=seed,
    )
    heldout = HeldOut(
        data[: evaluation.size],
        prompter,
        serving=serving,
        sampling=sampling,
        at_once=4,
        generations=evaluation.generations,
        pass_at=evaluation.pass_at,
        pass_reward=evaluation.pass_reward,
    )
    batches = Batches(prompts, renderer, AdvantageRule(ObjectiveConfig()), replay)
    parts = Parts(
        ledger,
        admission,
        buffer,
        prompts,
        rollouts,
        batches,
        weights,
        FakeRefits(rollout),
        heldout,
        journal,
        counters,
        lambda version: None,
        checkpoint,
        media_counters,
        engine_idleness,
        turns=turns(rollout),
        clock=clock,
    )
    controller = Controller(parts, config, evaluation)
    try:
        yield World(
            controller,
            ledger,
            admission,
            buffer,
            rollout,
            reward,
            pictures,
            policy,
            journal,
            counters,
            prompts,
            batches,
            checkpoints,
        )
    finally:
        weights.close()
        ledger.close()
