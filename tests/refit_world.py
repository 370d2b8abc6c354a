"""Light receivers for refits: the worker's own receiver and stager around a small torch module, all in this process.

The module's loader fuses, slices, stacks, casts and pads as engines' loaders do, so that what is committed went through
a recorded plan or through the loader, and its parameters can be compared byte for byte with a fresh module's.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

from omnifleet.auth import OPEN, Scope, Tokens
from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight, WeightVersion
from omnifleet.wire import refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.needs import NeedsBody, needs_digest
from omnifleet.wire.server import serving
from omnifleet_refit import group as group_module
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

HIDDEN = 8
BUCKET_BYTES = 16 << 10
DEADLINE_S = 20.0
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """Rank `rank` of `ranks`: QKV fused and sliced, an expert stack turned, an embedding with padding; of several, a cast."""

    def __init__(self, rank: int = 0, ranks: int = 2) -> None:
        super().__init__()
        self.rank, self.ranks = rank, ranks
        norm = torch.float32 if ranks == 1 else torch.bfloat16
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN), requires_grad=False)
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN // ranks, HIDDEN), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(3, HIDDEN, HIDDEN), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=norm), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        share = HIDDEN // self.ranks
        for name, w in weights:
            if name in ("q", "k", "v"):
                mine = w.narrow(0, self.rank * share, share)
                self.qkv.data.narrow(0, "qkv".index(name) * share, share).copy_(mine)
            elif name.startswith("expert."):
                self.experts.data[int(name[7:])].copy_(w.t())
            elif name == "embed":
                self.embed[: len(w)].data.copy_(w)
                self.embed[len(w) :].data.fill_(0)
            else:
                self.norm.data.copy_(w)


def tensors(step: int) -> Tensors:
    """All source tensors of a version; the embedding and expert 0 never change."""

    def of(name: str, *shape: int) -> torch.Tensor:
        frozen = name in ("embed", "expert.0")
        seed = sum(name.encode()) * 1000 + (0 if frozen else step)
        return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))

    square = (HIDDEN, HIDDEN)
    shapes = {"embed": (13, HIDDEN), "q": square, "k": square, "v": square, "norm": (HIDDEN,)}
    shapes |= {f"expert.{i}": square for i in range(3)}
    return {name: of(name, *shape) for name, shape in shapes.items()}


MOVES = {"q", "k", "v", "norm", "expert.1", "expert.2"}


def expected(step: int, rank: int = 0, ranks: int = 2) -> Tensors:
    """The oracle: parameters of a fresh module that loads the version's tensors through its own loader."""
    return loaded(tensors(step), rank, ranks)


def loaded(weights: Tensors, rank: int = 0, ranks: int = 2) -> Tensors:
    """Parameters of a fresh module that loads these tensors through its own loader."""
    fresh = Small(rank, ranks)
    fresh.load_weights(weights.items())
    return dict(fresh.state_dict())


def scores(parameters: Tensors, token_ids: Sequence[int]) -> list[float]:
    """What stands for logprobs of tokens: each a function of one row of the fused layer."""
    rows = parameters["qkv"]
    return [-float(rows[token % len(rows)].abs().sum()) for token in token_ids]


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint of step -1."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(-1), folder / "model.safetensors")
    return folder


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
        self._facts = replace(self._facts, transports=("shm", "nccl"), ranks=len(self.stagers), sparse=sparse)

    def _stager(self, checkpoint: Path, index: int, planned: bool, kept: KeptPlans | None) -> Stager:
        model, source = self.models[index], Weights(checkpoint)
        table = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in source.table.items()}
        build = f"small {model.rank} of {model.ranks}"
        found = kept.find(plan_key(model, table, build), model) if kept is not None else None
        plan = found or record(model, model.load_weights, table, build) if planned else None
        model.load_weights(tensors(-1).items())
        load = partial(self._load, model, source)
        return Stager(model, source, plan, load, self._device, index, kept=kept, checked=found is not None)

    def _load(self, model: Small, source: Weights) -> None:
        for number, (name, tensor) in enumerate(source.everything()):
            if self.break_at_load and number == 3:
                raise RuntimeError("the loader broke half-way")
            model.load_weights([(name, tensor)])

    async def stage(self, manifest_json: str, source: str) -> int:
        self._check_alive()
        for stager in self.stagers:
            stager.begin(manifest_json, source)
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
        return not self.standing.fence and all(
            torch.equal(model.state_dict()[name].cpu().view(torch.uint8), value.view(torch.uint8))
            for model in self.engine.models
            for name, value in loaded(weights, model.rank, model.ranks).items()
        )

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
            await engine.start()
            gate = Gate(Standing(f"w{number}", base_version(engine.facts.tensors)), limit=8)
            worker = Receiving(f"w{number}", engine, gate, Receiver(engine, gate, Counters(f"t{number}")))

            def register(server: object, worker: Receiving = worker) -> None:
                servicer = RefitServicer(worker.engine, worker.receiver, worker.gate)
                refit_pb2_grpc.add_RefitServicer_to_server(servicer, server)

            worker.address = await stack.enter_async_context(
                serving("127.0.0.1:0", register, tokens=OPEN, knob="test", grace_s=0)
            )
            worker.client = await stack.enter_async_context(RefitClient.open(worker.address))
            workers.append(worker)
        yield workers


class Sender:
    """The trainer's half without the fleet registry: a snapshot, a courier, what was published last."""

    def __init__(self, lineage: str = "l", device: torch.device = CPU) -> None:
        self.lineage = lineage
        self.snapshot = Snapshot(device, BUCKET_BYTES)
        self.courier = Courier(Meeting("127.0.0.1"), device)
        self.version: WeightVersion | None = None
        self.digests: dict[str, str] = {}

    def pack(self, step: int, *, whole: bool = False) -> Shipment:
        """Make the version of a step, on top of the last one or whole."""
        on_top = self.version is not None and not whole
        self.snapshot.pack(tensors(step).items(), MOVES)
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
        orders = {worker.id: Order(worker.client, shipment, worker.ranks) for worker in workers}
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


class Deaf:
    """A gloo group that behaves as NCCL's do: nobody feels a member's death, what waits for it never ends."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> DeafWork:
        return DeafWork(self._backend.broadcast(tensors, options))

    def abort(self) -> None:
        self._backend.abort()


class DeafWork:
    """An operation that is done when it went well, and else is never done."""

    def __init__(self, work: Any) -> None:
        self._work, self._failed = work, False

    def is_completed(self) -> bool:
        if not self._failed and self._work.is_completed():
            try:
                self._work.wait()
                return True
            except RuntimeError:
                self._failed = True
        return False

    def wait(self) -> None:
        pass


def deafen(patch: Callable[[object, str, object], None] = setattr) -> None:
    """All groups of this process that are made from now on are deaf."""
    make = group_module._backend
    patch(group_module, "_backend", lambda *told: Deaf(make(*told)))


def run_receiver(
    checkpoint: str,
    name: str,
    pipe: Any,
    deaf: bool = False,
    hidden: int = HIDDEN,
    ranks: Sequence[tuple[int, int]] = ((0, 2),),
    device: str = "cpu",
) -> None:
    """The process of a `Remote`: says its address, then answers each message with (fenced, version, whole).

    After the message "stop at commit" it says so when the next commit is in its gate, and goes no further.
    """
    globals()["HIDDEN"] = hidden
    if deaf:
        deafen()

    async def stop() -> None:
        pipe.send("in its gate")
        await asyncio.Event().wait()

    async def serve() -> None:
        async with receiving(Path(checkpoint), 1, ranks=ranks, device=torch.device(device)) as (worker,):
            pipe.send(worker.address)
            while message := await asyncio.to_thread(pipe.recv):
                if message == "stop at commit":
                    worker.engine.at_commit = stop
                pipe.send((worker.fenced, worker.version.number, worker.whole()))

    asyncio.run(serve())


@asynccontextmanager
async def joined(
    checkpoint: Path,
    name: str,
    gateway: str,
    tokens: Tokens,
    *,
    planned: bool = False,
    spoiled: set[int] | None = None,
) -> AsyncIterator[Receiving]:
    """A whole worker, member of the fleet of a gateway, that catches up by itself after a fifth of a second."""
    from omnifleet.config.services import RolloutConfig
    from omnifleet_rollout.worker.catchup import CatchUp
    from omnifleet_rollout.worker.command import Worker
    from omnifleet_rollout.worker.membership import Member

    async def find_gateway() -> str:
        return gateway

    engine = SmallEngine(checkpoint, planned=planned)
    engine.spoiled = spoiled or set()
    await engine.start()
    worker = Worker(engine, name, RolloutConfig(), tokens)
    secret = tokens.secret(Scope.SERVICE)
    async with serving("127.0.0.1:0", worker.register, tokens=tokens, knob="test", grace_s=0) as address:
        member = Member(
            engine,
            worker.standing,
            worker.counters,
            find_gateway=find_gateway,
            secret=secret,
            address=address,
            pool="default",
        )
        following = CatchUp(
            engine,
            worker.receiver,
            worker.standing,
            worker.counters,
            find_gateway=find_gateway,
            target=lambda: member.target,
            secret=secret,
            pool="default",
            patience_s=0.2,
            policy=InFlight.KEEP,
        )
        tasks = [asyncio.create_task(member.run()), asyncio.create_task(following.run())]
        try:
            yield Receiving(
                worker.standing.worker, engine, worker.gate, worker.receiver, address, worker.counters
            )
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def run_worker(
    checkpoint: str, name: str, gateway: str, tokens: Tokens, spoiled: set[int], pipe: Any
) -> None:
    """The process of a `joined` worker: says its id, then answers as `run_receiver`'s does."""

    async def serve() -> None:
        async with joined(Path(checkpoint), name, gateway, tokens, planned=True, spoiled=spoiled) as worker:
            pipe.send(worker.id)
            while await asyncio.to_thread(pipe.recv):
                pipe.send((worker.fenced, worker.version.number, worker.whole()))

    asyncio.run(serve())


def run_sender(addresses: dict[str, str], step: int, phase: str, pipe: Any) -> None:
    """A sender that publishes step 0 whole, then `step`, and says `phase` when it is there; then it waits to be killed."""

    def reached(now: str) -> None:
        if now == phase:
            pipe.send(now)
            threading.Event().wait()

    class Slow(list[torch.Tensor]):
        def __iter__(self) -> Iterator[torch.Tensor]:
            for number, bucket in enumerate(super().__iter__()):
                if number == len(self) - 1:
                    reached("broadcast")
                yield bucket

    async def send() -> None:
        async with AsyncExitStack() as stack:
            clients = {
                id: await stack.enter_async_context(RefitClient.open(a)) for id, a in addresses.items()
            }
            workers = [Remote(id, None, client) for id, client in clients.items()]
            sender = Sender("killed")
            await sender.publish(workers, 0)
            shipment = sender.pack(step, whole=True)
            reached("packed")
            outcomes = await sender.stage(workers, shipment, Slow(sender.buckets(shipment)))
            reached("staged")
            for worker in workers:
                await worker.client.commit(str(outcomes[worker.id]), InFlight.KEEP, deadline_s=DEADLINE_S)
                reached("committed one")

    asyncio.run(send())
