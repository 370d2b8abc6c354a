"""One row through its environment: an episode a sample, all or none; other rows go to the prompter."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Protocol

from omnifleet.environments.episode import Episode
from omnifleet.environments.outcome import Answered, Crashed, Lost, PromptError, Scored, TimedOut
from omnifleet.environments.play import Order, Played
from omnifleet.environments.task import Task
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import (
    Digest,
    Identity,
    Lease,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Sample,
    Sampling,
    Trajectory,
    VersionBound,
)
from omnifleet.wire import media_pb2
from omnifleet.wire.codec import media_from_wire
from omnifleet_trainer.batch.extras import NO_REPLAY, Replay
from omnifleet_trainer.loop.checks import check_extras, check_sample
from omnifleet_trainer.loop.failures import RefusedSample, Unplayable, first_of
from omnifleet_trainer.loop.prompting import Prompter, extra_of
from omnifleet_trainer.rendering import Renderer

if TYPE_CHECKING:
    from omnifleet_trainer.data import PromptRow

_SEEDS = 1 << 20  # seeds of one sample: its turns count on from the first


class Stage(Protocol):
    """Who plays an episode; `omnifleet.environments.pool.Pool` is one."""

    async def play(self, order: Order) -> Played:
        """Every end of an episode is an outcome."""
        ...


class Shelf(Protocol):
    """What is asked of the media service; `omnifleet.client.media.MediaClient` is one."""

    async def put(
        self, data: bytes, run: str, *, kind: MediaKind, contract: media_pb2.DecodeContract | None
    ) -> media_pb2.PutReply:
        """Have bytes, or a data URL, decoded."""
        ...

    async def put_url(
        self, url: str, run: str, *, kind: MediaKind, contract: media_pb2.DecodeContract | None
    ) -> media_pb2.PutReply:
        """Have a source read and decoded."""
        ...

    async def take_lease(self, digests: Iterable[str], owner: str, run: str, ttl_s: float) -> Lease:
        """Hold media."""
        ...


class Player:
    """Asks environments where a row's task has one."""

    def __init__(
        self,
        stage: Stage,
        tasks: Iterable[str],
        prompter: Prompter,
        renderer: Renderer,
        media: Shelf,
        *,
        mode: LogprobsMode,
        timeout_s: float,
        lease_s: float,
        max_tokens: int,
        clips: media_pb2.DecodeContract | None = None,
        sounds: media_pb2.DecodeContract | None = None,
        replay: Replay = NO_REPLAY,
    ) -> None:
        """tasks: those that are played. mode: what the logprobs must mean. timeout_s: life of an episode.

        lease_s: how long media of an episode are held; a step must train on it within that. max_tokens: longest episode.
        clips, sounds: how those of rows are sampled. replay: what sampled episodes must come with; greedy ones train nobody.
        """
        self._stage, self._tasks, self._prompter = stage, frozenset(tasks), prompter
        self._renderer, self._media, self._mode = renderer, media, mode
        self._contracts = {MediaKind.VIDEO: clips, MediaKind.AUDIO: sounds}
        self._replay = replay
        self._timeout_s, self._lease_s, self._max_tokens = timeout_s, lease_s, max_tokens

    async def ask(
        self, row: PromptRow, *, identity: Identity, sampling: Sampling, bound: VersionBound, lineage: str
    ) -> list[Trajectory]:
        """`sampling.n` scored trajectories, all or none.

        Raises OmnifleetError: Unplayable, INTERNAL (a crash), DEADLINE, what services raised, RefusedSample, Unscorable, Stale.
        """
        if row.task not in self._tasks:
            return await self._prompter.ask(
                row, identity=identity, sampling=sampling, bound=bound, lineage=lineage
            )
        task = await self._task(row, identity.run)
        orders = [self._order(row, task, identity, sampling, bound, i) for i in range(sampling.n)]
        try:
            async with asyncio.TaskGroup() as group:
                playing = [group.create_task(self._play(order, lineage)) for order in orders]
        except* OmnifleetError as errors:
            raise first_of(errors) from None
        ended = [task.result() for task in playing]
        trajectories = [
            _trajectory(row, order.identity, episode, self._renderer.opened)
            for order, (_, episode) in zip(orders, ended, strict=True)
        ]
        await self._judge(row, trajectories, [outcome for outcome, _ in ended], identity)
        await self._hold(trajectories, identity)
        return trajectories

    async def _task(self, row: PromptRow, run: str) -> Task:
        media = await self._renderer.place(row.images)
        for kind, urls in ((MediaKind.VIDEO, row.clips), (MediaKind.AUDIO, row.sounds)):
            self._renderer.check_kind(kind if urls else MediaKind.IMAGE)
            media += tuple([await self._fetch(url, kind, run) for url in urls])
        return Task(row.prompt_id, row.text, row.answer, extra=dict(row.extra), media=media)

    async def _fetch(self, url: str, kind: MediaKind, run: str) -> MediaRef:
        """By content: bytes that come as a data URL are put, everything else the media service reads itself."""
        if url.startswith("media://"):
            return MediaRef(kind, Digest(url.removeprefix("media://")))
        contract = self._contracts.get(kind)
        if url.startswith("data:"):
            reply = await self._media.put(url.encode(), run, kind=kind, contract=contract)
        else:
            reply = await self._media.put_url(url, run, kind=kind, contract=contract)
        return media_from_wire(reply.ref)

    def _order(
        self,
        row: PromptRow,
        task: Task,
        identity: Identity,
        sampling: Sampling,
        bound: VersionBound,
        sample: int,
    ) -> Order:
        who = replace(
            identity,
            environment=identity.environment or row.task,
            session=f"{identity.attempt}/{sample}",
            episode=f"{identity.attempt}/{sample}",
            sample=sample,
        )
        seed = None if sampling.seed is None else (sampling.seed * _SEEDS + sample * 1024) % (1 << 62)
        one = replace(sampling, n=1, seed=seed)
        extras = self._replayed(one).names
        dice = sampling.seed or 0
        return Order(row.task, task, who, one, bound, self._timeout_s, dice=dice, extras=extras)

    def _replayed(self, sampling: Sampling) -> Replay:
        return self._replay if sampling.temperature > 0 else NO_REPLAY

    async def _play(self, order: Order, lineage: str) -> tuple[Scored | Answered, Episode]:
        played = await self._stage.play(order)
        match played.outcome:
            case Scored() | Answered() as outcome:
                assert played.episode is not None, "the pool gives one with every such outcome"
                self._check(played.episode, order, lineage)
                return outcome, played.episode
            case PromptError(message):
                raise Unplayable(Reason.INVALID_REQUEST, f"{order.environment}: {message}")
            case Crashed(message):
                raise OmnifleetError(Reason.INTERNAL, f"{order.environment} crashed: {message}")
            case TimedOut(seconds):
                raise retryable(
                    Reason.DEADLINE,
                    f"{order.environment}: an episode took more than {seconds:g} s",
                    knob="environments.timeout_s",
                )
            case Lost(error):
                raise error

    def _check(self, episode: Episode, order: Order, lineage: str) -> None:
        if episode.logprobs_mode is not self._mode:
            raise RefusedSample(
                Reason.LOGPROBS_MODE,
                f"the engine gives {episode.logprobs_mode} logprobs, the trainer computes {self._mode}",
                knob="rollout.logprobs_mode",
                check="logprobs_mode",
            )
        length = len(episode.prompt_token_ids) + len(episode.token_ids)
        if length > self._max_tokens:
            raise RefusedSample(
                Reason.INVALID_REQUEST,
                f"an episode of {length} tokens, at most {self._max_tokens} can be trained",
                knob="trainer.micro_batch_tokens",
                check="length",
            )
        sample = Sample(
            order.identity.sample,
            episode.token_ids,
            episode.logprobs,
            episode.spans,
            finish_reason=episode.finish_reason,
            routed_experts=episode.routed_experts,
            sampling_mask=episode.sampling_mask,
        )
        check_sample(sample, run=order.identity.run, lineage=lineage)
        check_extras(sample, len(episode.prompt_token_ids), self._replayed(order.sampling))

    async def _judge(
        self,
        row: PromptRow,
        trajectories: Sequence[Trajectory],
        outcomes: Sequence[Scored | Answered],
        identity: Identity,
    ) -> None:
        """Fill in the rewards: the environment's own, or those of the recipe's scorers."""
        said: dict[int, str] = {}
        for at, (trajectory, outcome) in enumerate(zip(trajectories, outcomes, strict=True)):
            if isinstance(outcome, Scored):
                trajectory.reward, trajectory.components = outcome.reward, dict(outcome.components)
                trajectory.reward_version = f"environment:{row.task}"
            else:
                said[at] = outcome.text
        if not said:
            return
        media = trajectories[0].media
        for at, score in zip(
            said, await self._prompter.judge(row, said, identity=identity, media=media), strict=True
        ):
            trajectory = trajectories[at]
            trajectory.reward, trajectory.components = score.score, score.components
            trajectory.reward_version = score.reward_version

    async def _hold(self, trajectories: Sequence[Trajectory], identity: Identity) -> None:
        """What an environment made exists nowhere else: nothing of it may be evicted before the step."""
        digests = {ref.digest for trajectory in trajectories for ref in trajectory.media}
        if digests:
            await self._media.take_lease(
                sorted(digests), f"group/{identity.attempt}", identity.run, self._lease_s
            )


def _trajectory(row: PromptRow, identity: Identity, episode: Episode, opened: str) -> Trajectory:
    return Trajectory(
        id=f"{identity.attempt}/{identity.sample}",
        identity=identity,
        prompt_token_ids=episode.prompt_token_ids,
        prompt_hash=episode.prompt_hash,
        token_ids=episode.token_ids,
        logprobs=episode.logprobs,
        spans=episode.spans,
        logprobs_mode=episode.logprobs_mode,
        finish_reason=episode.finish_reason,
        text=episode.text,
        media=episode.media,
        reward=0.0,
        reward_version="",
        prompt=row.text,
        ground_truth=row.answer,
        prompt_suffix=opened,
        extra=extra_of(row),
        mask=episode.mask,
        routed_experts=episode.routed_experts,
        sampling_mask=episode.sampling_mask,
    )
