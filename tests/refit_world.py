"""Light receivers for refits: the worker's own receiver and stager around a small torch module, all in this process.

The module's loader fuses, slices, stacks, casts and pads as engines' loaders do, so that what is committed went through
a recorded plan or through the loader, and its parameters can be compared byte for byte with a fresh module's.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn

from omnifleet.auth import OPEN
from omnifleet.client.refit import RefitClient
from omnifleet.telemetry.counters import Counters
from omnifleet.types import InFlight
from omnifleet.wire import refit_pb2_grpc
from omnifleet.wire.manifest import base_version
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.checkpoint import read_table
from omnifleet_rollout.engine.fake import FakeEngine
from omnifleet_rollout.refit.buckets import DTYPES
from omnifleet_rollout.refit.plan import record
from omnifleet_rollout.refit.receiver import Receiver
from omnifleet_rollout.refit.stager import Stager
from omnifleet_rollout.refit.weights import Weights
from omnifleet_rollout.worker.gate import Gate
from omnifleet_rollout.worker.server import RefitServicer
from omnifleet_rollout.worker.standing import Standing

HIDDEN = 8
CPU = torch.device("cpu")
Tensors = dict[str, torch.Tensor]


class Small(nn.Module):
    """Rank 0 of two: QKV fused and sliced, an expert stack turned, an embedding with padding, a cast."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.zeros(16, HIDDEN), requires_grad=False)
        self.qkv = nn.Parameter(torch.zeros(3 * HIDDEN // 2, HIDDEN), requires_grad=False)
        self.experts = nn.Parameter(torch.zeros(3, HIDDEN, HIDDEN), requires_grad=False)
        self.norm = nn.Parameter(torch.zeros(HIDDEN, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        half = HIDDEN // 2
        for name, w in weights:
            if name in ("q", "k", "v"):
                self.qkv.data.narrow(0, "qkv".index(name) * half, half).copy_(w.narrow(0, 0, half))
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


def expected(step: int) -> Tensors:
    """The oracle: parameters of a fresh module that loads the version's tensors through its own loader."""
    fresh = Small()
    fresh.load_weights(tensors(step).items())
    return dict(fresh.state_dict())


def write_checkpoint(folder: Path) -> Path:
    """A checkpoint of step -1."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors(-1), folder / "model.safetensors")
    return folder


class SmallEngine(FakeEngine):
    """A fake engine for tokens around a real stager for weights. planned: refits may go by plan."""

    def __init__(self, checkpoint: Path, *, planned: bool = True) -> None:
        super().__init__(table=read_table(checkpoint))
        self._facts = self.transporting(("shm", "nccl"))
        self.model = Small()
        source = Weights(checkpoint)
        table = {name: (DTYPES[dtype], shape) for name, (dtype, shape) in source.table.items()}
        plan = record(self.model, self.model.load_weights, table, "small") if planned else None
        self.model.load_weights(tensors(-1).items())
        self.by_plan: list[bool] = []
        self.break_at_load = False
        self.stager = Stager(self.model, source, plan, lambda: self._load(source), CPU)

    def transporting(self, transports: tuple[str, ...]):  # type: ignore[no-untyped-def]
        from dataclasses import replace

        return replace(self._facts, transports=transports)

    def _load(self, source: Weights) -> None:
        for number, (name, tensor) in enumerate(source.everything()):
            if self.break_at_load and number == 3:
                raise RuntimeError("the loader broke half-way")
            self.model.load_weights([(name, tensor)])

    async def stage(self, manifest_json: str, source: str) -> int:
        self._check_alive()
        self.stager.begin(manifest_json, source)
        while (size := self.stager.poll()) is None:  # noqa: ASYNC110  an engine's process tells no event
            await asyncio.sleep(0.002)
        return size

    async def commit(
        self, manifest_digest: str, label: str, policy: InFlight, *, encoder_changed: bool
    ) -> int:
        self._check_alive()
        loaded = self.stager.commit(manifest_digest)
        self.by_plan.append(loaded.by_plan)
        self._label = label
        return loaded.tensors

    async def drop_stage(self) -> None:
        self.stager.drop()


@dataclass
class Receiving:
    """One worker as far as refits see it."""

    id: str
    engine: SmallEngine
    gate: Gate
    receiver: Receiver
    address: str = ""
    client: RefitClient = field(init=False)

    @property
    def standing(self) -> Standing:
        """Version and fence."""
        return self.gate.standing

    def holds(self, step: int) -> bool:
        """True if the worker serves and its parameters are those of a fresh module at that version, byte for byte."""
        ours, theirs = self.engine.model.state_dict(), expected(step)
        same = all(torch.equal(ours[name], theirs[name]) for name in theirs)
        return same and not self.standing.fence

    def whole(self, steps: Mapping[int, int]) -> bool:
        """The property: it serves nothing, or exactly one of the versions that were committed."""
        return bool(self.standing.fence) or self.holds(steps.get(self.standing.version.number, -1))


@asynccontextmanager
async def receiving(checkpoint: Path, count: int, *, planned: bool = True) -> AsyncIterator[list[Receiving]]:
    """Workers with a Refit service each, and a client of it."""
    async with AsyncExitStack() as stack:
        workers = []
        for number in range(count):
            engine = SmallEngine(checkpoint, planned=planned)
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


def manifest_text(body: Mapping[str, object]) -> str:
    """A manifest body as the engine gets it."""
    return json.dumps(body, sort_keys=True, separators=(",", ":"))
