"""Light receivers for refits, and the sender's half: the worker's own receiver and stager around the small model.

All in this process; `refit_processes` puts them into processes of their own.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from omnifleet.auth import OPEN
from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.needs import NeedsBody, needs_digest
from omnifleet.wire.server import serving
from omnifleet_refit.group import Meeting
from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.engine.port import EnginePrompt
from omnifleet_rollout.refit.buckets import DTYPES
from omnifleet_rollout.refit.kept import KeptPlans
from omnifleet_rollout.refit.plan import plan_key, record
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.refit.stager import Stager
from omnifleet_rollout.refit.weights import Weights
from omnifleet_rollout.worker.gate import Gate
from omnifleet_rollout.worker.server import RefitServicer
from omnifleet_rollout.worker.standing import Standing
from omnifleet_trainer.refit.courier import Courier, Order, Outcome
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot
from tests.refit_model import MOVES, Small, Tensors, loaded, scores, tensors

BUCKET_BYTES = 16 << 10
DEADLINE_S = 20.0
CPU = torch.device("cpu")
TRANSPORTS = ("shm", "nccl", "cuda_ipc")


def load_small(model: Small, source: Weights) -> None:
    """What stands for an engine's own loader."""
    model.load_weights(source.everything())


def small_stager(
    model: Small,
    checkpoint: Path,
    device: torch.device,
    rank: int,
    load: Callable[[Small, Weights], None] = load_small,
    planned: bool = True,
    kept: KeptPlans | None = None,
) -> Stager:
    """The stager of one rank, which holds the checkpoint's weights."""
    source = Weights(checkpoint)
    table = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in source.table.items()}
    build = f"small {model.rank} of {model.ranks}"
    found = kept.find(plan_key(model, table, build), model) if kept is not None else None
    plan = found or record(model, model.load_weights, table, build) if planned else None
    model.load_weights(tensors(-1).items())
    loading = partial(load, model, source)
    return Stager(model, source, plan, loading, device, rank, kept=kept, checked=found is not None)


def small_holds(model: Small, weights: Tensors) -> bool:
    """True if the parameters are what a fresh module makes of these tensors, byte for byte."""
    return all(
        torch.equal(model.state_dict()[name].cpu().view(torch.uint8), value.view(torch.uint8))
        for name, value in loaded(weights, model.rank, model.ranks).items()
    )


class SmallEngine(FakeEngine):
    """A fake engine for tokens around real stagers for weights, one a rank. planned: refits may go by plan; plans: kept there.

    ranks: (rank, of how many) of each rank that it has: by default the first of two, alone.
    """

    def __init__(
        self,
        checkpoint: Path,
        *,
        planned: bool = True,
        plans: Path | None = None,
        ranks: Sequence[tuple[int, int]] = ((0, 2),),
        device: torch.device = CPU,
    ) -> None:
        super().__init__(table=read_table(checkpoint))
        self.models = [Small(*rank).to(device) for rank in ranks]
        self._device = device
        self.model = self.models[0]
        self.by_plan: list[bool] = []
        self.break_at_load = False
        self.at_commit: Callable[[], Awaitable[None]] | None = None
        """Called in the middle of a commit."""
        self.spoiled: set[int] = set()
        """Numbers of versions after whose commit a layer is changed, unseen by any checksum."""
        self.stagers = [
            self._stager(checkpoint, index, planned, KeptPlans(plans) if plans is not None else None)
            for index in range(len(self.models))
        ]
        self.stager = self.stagers[0]
        sparse = all(stager.takes_sparse for stager in self.stagers)
        self._facts = replace(self._facts, transports=TRANSPORTS, ranks=len(self.stagers), sparse=sparse)

    def _stager(self, checkpoint: Path, index: int, planned: bool, kept: KeptPlans | None) -> Stager:
        return small_stager(self.models[index], checkpoint, self._device, index, self._load, planned, kept)

    def _load(self, model: Small, source: Weights) -> None:
        for number, (name, tensor) in enumerate(source.everything()):
            if self.break_at_load and number == 3:
                raise RuntimeError("the loader broke half-way")
            model.load_weights([(name, tensor)])

    def limit_shadow(self, size: int | None) -> None:
        """So many bytes of the device or the host are there for a shadow; None: all."""
        for stager in self.stagers:
            stager._reception.memory.release()
            stager._reception.memory.limit = size

    async def stage(self, manifest_json: str, source: str, *, in_place: bool = False) -> int:
        self._check_alive()
        for stager in self.stagers:
            stager.begin(manifest_json, source, in_place=in_place)
        sizes = []
        for stager in self.stagers:
            while (size := stager.poll()) is None:  # noqa: ASYNC110  an engine's process tells no event
                await asyncio.sleep(0.002)
            sizes.append(size)
        return sizes[0]

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        self._check_alive()
        if self.at_commit is not None:
            await self.at_commit()
        loaded = [stager.commit(manifest_digest) for stager in self.stagers]
        self.by_plan.append(all(one.by_plan for one in loaded))
        if int(label.rpartition(":")[2]) in self.spoiled:
            self.model.qkv.mul_(1.5)
        self._label = label
        return loaded[0].tensors

    async def score(self, prompt: EnginePrompt, token_ids: Sequence[int]) -> list[float]:
        self._check_alive()
        return scores(dict(self.model.state_dict()), token_ids)

    def needs(self) -> str:
        return needs_digest([stager.needs_digest for stager in self.stagers])

    async def read_needs(self) -> list[NeedsBody]:
        return [stager.needs for stager in self.stagers]

    async def export(self, path: str, tensors: Sequence[tuple[str, str]]) -> None:
        self._check_alive()
        await asyncio.to_thread(self.stager.export, path, tensors)

    async def drop_stage(self) -> None:
        for stager in self.stagers:
            stager.drop()


@dataclass
class Receiving:
    """One worker as far as refits see it."""

    id: str
    engine: SmallEngine
    gate: Gate
    receiver: Receiver
    address: str = ""
    counters: Counters = field(default_factory=lambda: Counters("test"))
    client: RefitClient = field(init=False)

    @property
    def ranks(self) -> int:
        """Of its engine."""
        return len(self.engine.stagers)

    @property
    def standing(self) -> Standing:
        """Version and fence."""
        return self.gate.standing

    @property
    def version(self) -> WeightVersion:
        """What it serves."""
        return self.standing.version

    @property
    def fenced(self) -> bool:
        """True while its weights are not whole."""
        return bool(self.standing.fence)

    def holds(self, step: int) -> bool:
        """True if the worker serves and its parameters are those of a fresh module at that version, byte for byte."""
        return self.has(tensors(step))

    def has(self, weights: Tensors) -> bool:
        """True if the worker serves and its parameters are what a fresh module makes of these tensors, byte for byte."""
        return not self.standing.fence and all(small_holds(model, weights) for model in self.engine.models)

    def whole(self) -> bool:
        """The property: it serves nothing, or exactly the one version that it says. A version's number is its step."""
        return self.fenced or self.holds(self.version.number if self.version.run else -1)


@asynccontextmanager
async def receiving(
    checkpoint: Path,
    count: int,
    *,
    planned: bool = True,
    plans: Path | None = None,
    ranks: Sequence[tuple[int, int]] = ((0, 2),),
    device: torch.device = CPU,
) -> AsyncIterator[list[Receiving]]:
    """Workers with a Refit service each, and a client of it. The rest: see `SmallEngine`."""
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(count):
            engine = SmallEngine(checkpoint, planned=planned, plans=plans, ranks=ranks, device=device)
            workers.append(await stack.enter_async_context(served(engine, f"w{number}", f"t{number}")))
        yield workers


@asynccontextmanager
async def served(engine: Any, name: str, counting: str = "test") -> AsyncIterator[Receiving]:
    """A worker with a Refit service around an engine, and a client of it. counting: name of its counters."""
    await engine.start()
    gate = Gate(Standing(name, base_version(engine.facts.tensors)), limit=8)
    counters = Counters(counting)
    worker = Receiving(name, engine, gate, Receiver(engine, gate, counters), counters=counters)

    def register(server: object) -> None:
        servicer = RefitServicer(worker.engine, worker.receiver, worker.gate)
        refit_pb2_grpc.add_RefitServicer_to_server(servicer, server)

    async with serving("127.0.0.1:0", register, tokens=OPEN, knob="test", grace_s=0) as worker.address:
        async with RefitClient.open(worker.address) as worker.client:
            yield worker


class Sender:
    """The trainer's half without the fleet registry: a snapshot, a courier, what was published last."""

    def __init__(self, lineage: str = "l", device: torch.device = CPU) -> None:
        self.lineage = lineage
        self.snapshot = Snapshot(device, BUCKET_BYTES)
        self.courier = Courier(Meeting("127.0.0.1"), device)
        self.version: WeightVersion | None = None
        self.digests: dict[str, str] = {}
        self.in_place: InFlight | None = None
        """Set: who has no room for a shadow takes it straight into place."""

    def pack(self, step: int, *, whole: bool = False) -> Shipment:
        """Make the version of a step, on top of the last one or whole."""
        on_top = self.version is not None and not whole
        placed = {name: tensor.to(self.snapshot.device) for name, tensor in tensors(step).items()}
        self.snapshot.pack(placed.items(), MOVES)
        version = WeightVersion("r", self.lineage, step)
        return self.snapshot.shipment(
            version, self.version if on_top else None, self.digests if on_top else None, True
        )

    def buckets(self, shipment: Shipment) -> list[torch.Tensor]:
        """What is broadcast for a shipment."""
        return [self.snapshot.buckets[i] for i in shipment.buckets]

    async def stage(
        self,
        workers: Iterable[Receiving | Remote],
        shipment: Shipment,
        buckets: Sequence[torch.Tensor] | None = None,
        deadline_s: float = DEADLINE_S,
    ) -> dict[str, Outcome]:
        """Broadcast; worker -> outcome."""
        orders = {w.id: Order(w.client, shipment, w.ranks, self.in_place) for w in workers}
        return await self.courier.stage(orders, buckets or self.buckets(shipment), deadline_s)

    async def publish(
        self, workers: Sequence[Receiving | Remote], step: int, *, whole: bool = False
    ) -> Shipment:
        """Stage and commit on all. Raises what any worker says."""
        shipment = self.pack(step, whole=whole)
        outcomes = await self.stage(workers, shipment)
        for worker in workers:
            outcome = outcomes[worker.id]
            if isinstance(outcome, OmnifleetError):
                raise outcome
            await worker.client.commit(outcome, InFlight.KEEP, deadline_s=DEADLINE_S)
        self.took(shipment)
        return shipment

    def took(self, shipment: Shipment) -> None:
        """The fleet is at this version now."""
        self.version, self.digests = shipment.version, dict(self.snapshot.digests)


@dataclass
class Remote:
    """A worker in a process of its own, as its sender sees it."""

    id: str
    process: Any
    client: RefitClient
    pipe: Any = None
    ranks: int = 1
    address: str = ""
