"""An engine whose ranks are processes, as vLLM's are: each has a stager of its own behind a door, and no group with the others."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet.wire.needs import NeedsBody, needs_digest
from omnifleet_refit import lent
from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.refit.door import Door, knock_all
from omnifleet_rollout.refit.stager import Stager
from tests import refit_model
from tests.refit_lent import rehearse
from tests.refit_model import Small, tensors
from tests.refit_processes import own, settle
from tests.refit_world import DEADLINE_S, TRANSPORTS, small_holds, small_stager


class Verbs:
    """What a rank's process is asked for, beside its door."""

    def __init__(self, model: Small, stager: Stager, device: torch.device) -> None:
        self._model, self._stager, self._device = model, stager, device

    def commit(self, digest: str) -> dict[str, Any]:
        return asdict(self._stager.commit(digest))

    def needs(self) -> NeedsBody:
        return self._stager.needs

    def drop(self) -> None:
        self._stager.drop()

    def holds(self, step: int) -> bool:
        """Its parameters are those of a fresh rank at that version."""
        return small_holds(self._model, tensors(step))

    def limit(self, size: int) -> None:
        """So many bytes are there for a shadow."""
        self._stager._reception.memory.release()
        self._stager._reception.memory.limit = size

    def read(self, handles: str) -> int:
        """Map what is lent, and sum up all its bytes."""
        memory = [lent.mapped(handle, self._device) for handle in json.loads(handles)]
        return sum(int(one.sum()) for one in memory)


def run_rank(
    checkpoint: str, rank: int, ranks: int, device: str, blind: bool, hidden: int, pipe: Any
) -> None:
    """The process of a rank: tells of its door, then answers (verb, argument). blind: it sees its own GPU alone."""
    settle(False, hidden)
    place = own(device) if blind else torch.device(device)
    if place.type == "cpu":
        rehearse()
    model = Small(rank, ranks).to(place)
    stager = small_stager(model, Path(checkpoint), place, rank)
    verbs = Verbs(model, stager, place)
    pipe.send(Door(stager.begin, stager.export).name)
    while True:
        verb, arguments = pipe.recv()
        try:
            pipe.send((True, getattr(verbs, verb)(*arguments)))
        except OmnifleetError as error:
            pipe.send((False, (str(error.reason), error.message)))


@dataclass
class RankProcess:
    """A rank as its engine sees it."""

    process: Any
    pipe: Any
    door: str = ""

    async def hear(self) -> Any:
        """The next message. Raises EOFError if it died."""
        async with asyncio.timeout(6 * DEADLINE_S):
            return await asyncio.to_thread(self.pipe.recv)


class RanksEngine(FakeEngine):
    """A fake engine for tokens around the processes of its ranks."""

    def __init__(self, checkpoint: Path, ranks: Sequence[RankProcess]) -> None:
        super().__init__(table=read_table(checkpoint))
        self.ranks, self._said = ranks, ""
        self.by_plan: list[bool] = []
        self._facts = replace(self._facts, transports=TRANSPORTS, ranks=len(ranks), sparse=False)

    async def ask(self, verb: str, *arguments: Any) -> list[Any]:
        """The answers of all ranks. Raises what the first says that refuses."""
        for rank in self.ranks:
            rank.pipe.send((verb, arguments))
        answers = [await rank.hear() for rank in self.ranks]
        for good, answer in answers:
            if not good:
                raise OmnifleetError(Reason(answer[0]), answer[1])
        return [answer for _, answer in answers]

    async def holds(self, step: int) -> bool:
        """All ranks hold that version, byte for byte."""
        return all(await self.ask("holds", step))

    async def stage(self, manifest_json: str, source: str, *, in_place: bool = False) -> int:
        doors = [rank.door for rank in self.ranks]
        return await knock_all(doors, manifest_json, source, in_place=in_place)

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        loaded = await self.ask("commit", manifest_digest)
        self._said = needs_digest([one["needs"] for one in loaded])
        self.by_plan.append(all(one["by_plan"] for one in loaded))
        self._label = label
        return int(loaded[0]["tensors"])

    def needs(self) -> str:
        return self._said

    async def read_needs(self) -> list[NeedsBody]:
        return await self.ask("needs")

    async def drop_stage(self) -> None:
        await self.ask("drop")


@asynccontextmanager
async def ranks_engine(
    spawner: Any, checkpoint: Path, devices: Sequence[str], *, blind: bool = False
) -> AsyncIterator[RanksEngine]:
    """An engine with a rank on each of these devices, which may be one. Its processes end with it."""
    async with AsyncExitStack() as stack:
        ranks = []
        for number, device in enumerate(devices):
            ours, theirs = multiprocessing.Pipe()
            told = (str(checkpoint), number, len(devices), device, blind, refit_model.HIDDEN, theirs)
            process = spawner.Process(target=run_rank, args=told)
            process.start()
            theirs.close()
            stack.callback(process.join, 10)
            stack.callback(process.kill)
            ranks.append(RankProcess(process, ours))
        for rank in ranks:
            rank.door = await rank.hear()
        yield RanksEngine(checkpoint, ranks)
