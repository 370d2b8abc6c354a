"""The trainer's half here on the first GPU, a worker with a vLLM engine for each size on the second, or on the same one.

Two GPUs: transport `nccl`, beside a raw NCCL broadcast. One GPU: `cuda_ipc`, beside a copy within the device.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from phases import Phases, timeline
from sizes import write_size

from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError
from omnifleet.types import InFlight, WeightVersion
from omnifleet_refit.fold import fold
from omnifleet_refit.group import Group, Meeting
from omnifleet_trainer.refit.courier import Courier, Order, Outcome
from omnifleet_trainer.refit.handles import handles
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot

PHASES_ENV = "OMNIFLEET_BENCH_PHASES"
"""Set: also print when each step of a refit began and ended, of the sender (`await_ready`, `finish`) and of the worker."""
HERE = Path(__file__).parent
DEVICE = torch.device("cuda", 0)
RAW_BYTES, RAW_TIMES = 256 << 20, 40
DEADLINE_S = 60.0
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "enforce_eager": True,
    "threads": 4,
}
KV_BYTES = {"tiny": 1 << 30, "2B": 4 << 30, "7B": 4 << 30}


@dataclass
class Row:
    """One line of the table, medians. rate: GB/s, bytes over seconds from the first bucket to the commit."""

    size: str
    path: str
    gigabytes: float
    seconds: float
    gate_ms: float
    commit_ms: float = float("nan")
    pack_ms: float = float("nan")
    note: str = ""

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.gigabytes / self.seconds


@dataclass
class Child:
    """A worker process."""

    size: str
    shapes: dict[str, tuple[int, ...]]
    process: subprocess.Popen[bytes]
    answers: Any
    log: Path
    address: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError with the log if the worker ended."""
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"the {self.size} worker ended:\n" + self.log.read_text()[-5000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, do: str, **fields: Any) -> None:
        """Give an order; see `worker.Orders`."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": do, **fields}) + "\n").encode())
        self.process.stdin.flush()

    def gap(self) -> float:
        """Seconds of the longest gap between tokens since the last call."""
        self.order("gap")
        return float(self.read()["gap"])


@contextmanager
def worker(size: str, folder: Path) -> Iterator[Child]:
    model = folder / size
    model.mkdir(parents=True)
    shapes = write_size(size, model)
    read, write = os.pipe()
    log = folder / f"{size}.log"
    engine = json.dumps({**ENGINE, "kv_cache_memory_bytes": KV_BYTES[size]})
    env = dict(
        os.environ,
        CUDA_VISIBLE_DEVICES=str(torch.cuda.device_count() - 1),
        OMNIFLEET_REFIT_UNVERIFIED="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        NCCL_NVLS_ENABLE="0",
    )
    command = [sys.executable, str(HERE / "worker.py"), str(model), engine, str(write)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=errors, stderr=errors, pass_fds=[write]
        )
    os.close(write)
    with os.fdopen(read) as answers:
        try:
            yield Child(size, shapes, process, answers, log)
        finally:
            process.kill()
            process.wait(30)


def raw_rate(meeting: Meeting) -> float:
    """GB/s of RAW_TIMES broadcasts of one bucket each, no checks, no engine."""
    name = meeting.new_name()
    seat = f"group://{meeting.host}:{meeting.port}/{name}?rank=1&size=2&deadline_s=60"
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="1")
    arguments = [sys.executable, str(HERE / "raw.py"), seat, str(RAW_BYTES), str(RAW_TIMES + 3)]
    with subprocess.Popen(arguments, env=env) as other:
        group = meeting.open_group(name, 2, DEVICE, 60)
        bucket = torch.empty(RAW_BYTES, dtype=torch.uint8, device=DEVICE)
        deadline = time.monotonic() + 60
        with group.stream():
            for _ in range(3):
                group.broadcast(bucket, deadline)
            group.finish(deadline)
            began = time.monotonic()
            for _ in range(RAW_TIMES):
                group.broadcast(bucket, deadline)
            group.finish(deadline)
        seconds = time.monotonic() - began
        other.wait(60)
    group.abort()
    return RAW_BYTES * RAW_TIMES / seconds / 1e9


def copy_rate() -> float:
    """GB/s of a copy of one bucket within the device."""
    source = torch.randint(0, 256, (RAW_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    target.copy_(source)
    torch.cuda.synchronize(DEVICE)
    began = time.monotonic()
    for _ in range(RAW_TIMES):
        target.copy_(source)
    torch.cuda.synchronize(DEVICE)
    return RAW_BYTES * RAW_TIMES / (time.monotonic() - began) / 1e9


def fold_rate() -> float:
    """GB/s of the device checksum of one bucket with 16 tensors."""
    bucket = torch.randint(0, 256, (RAW_BYTES,), dtype=torch.uint8, device=DEVICE)
    starts = [i * (RAW_BYTES // 16) for i in range(16)]
    fold(bucket, starts)
    torch.cuda.synchronize(DEVICE)
    began = time.monotonic()
    for _ in range(RAW_TIMES):
        fold(bucket, starts)
    torch.cuda.synchronize(DEVICE)
    return RAW_BYTES * RAW_TIMES / (time.monotonic() - began) / 1e9


def change(child: Child, step: int) -> None:
    """New bytes in every tensor."""
    generator = torch.Generator(DEVICE).manual_seed(step)
    for name, shape in child.shapes.items():
        weight = child.weights.setdefault(name, torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
        weight.normal_(0, 0.02, generator=generator)
    torch.cuda.synchronize(DEVICE)


async def send(client: RefitClient, shipment: Shipment, snapshot: Snapshot, courier: Courier) -> Outcome:
    """Stage on the worker; `courier.began` is when the first bucket was there to be taken."""
    buckets = [snapshot.buckets[i] for i in shipment.buckets]
    if torch.cuda.device_count() > 1:
        return (await courier.stage({"w": Order(client, shipment)}, buckets, DEADLINE_S))["w"]
    source = handles(buckets, DEVICE)
    courier.began = time.monotonic()
    return await client.stage(shipment.manifest, source, deadline_s=DEADLINE_S)


async def ours(child: Child, meeting: Meeting, times: int) -> list[Row]:
    """A first refit, which checks the plan against the loader, then `times` verified and `times` unverified ones."""
    rows = []
    parent: WeightVersion | None = None
    sending = Phases()
    sending.watch(Group, "await_ready", "finish")
    async with RefitClient.open(child.address) as client:
        for verified in (True, False):
            snapshot, courier = Snapshot(DEVICE, verified=verified), Courier(meeting, DEVICE)
            taken: list[tuple[float, float, float, float]] = []
            for step in range(times + (2 if verified else 1)):
                number = step if verified else 100 + step
                change(child, number)
                began = time.monotonic()
                snapshot.pack(child.weights.items(), child.weights)
                torch.cuda.synchronize(DEVICE)
                packed = time.monotonic() - began
                shipment = snapshot.shipment(WeightVersion("bench", "a", number), parent, None, False)
                await asyncio.sleep(0.3)
                child.gap()
                sending.taken()
                began = time.monotonic()
                outcome = await send(client, shipment, snapshot, courier)
                if isinstance(outcome, OmnifleetError):
                    raise outcome
                staged = time.monotonic()
                commit = await client.commit(outcome, InFlight.KEEP, deadline_s=DEADLINE_S)
                done = time.monotonic()
                handshake, began = courier.began - began, courier.began
                await asyncio.sleep(0.2)
                gap = child.gap()
                child.order("load_ms")
                load_ms = child.read()["ms"]
                child.order("phases")
                calls = sorted([*sending.taken(), *child.read()["calls"]], key=lambda call: call[2])
                parent = commit.version
                kind = "verified" if verified else "unverified"
                rate = shipment.bytes / 1e9 / (done - began)
                parts = {
                    "pack": packed,
                    "handshake": handshake,
                    "stage": staged - began,
                    "commit": done - staged,
                    "gap": gap,
                }
                shown = ", ".join(f"{name} {seconds * 1e3:.1f}" for name, seconds in parts.items())
                print(
                    f"{child.size} {kind} {number}: {shown}, load {load_ms:.1f} ms, {rate:.1f} GB/s",
                    flush=True,
                )
                if PHASES_ENV in os.environ:
                    print(f"    ms after the first bucket: {timeline(calls, began)}", flush=True)
                taken.append((packed, done - began, done - staged, gap))
            del snapshot
            torch.cuda.empty_cache()
            courier.close()
            steady = taken[-times:]
            pack, seconds, commit_s, gap = (statistics.median(column) for column in zip(*steady, strict=True))
            name = "ours, verified" if verified else "ours, unverified"
            rows.append(
                Row(child.size, name, shipment.bytes / 1e9, seconds, gap * 1e3, commit_s * 1e3, pack * 1e3)
            )
    return rows


def stock(child: Child, times: int) -> Row:
    """vLLM's own packed engine: paused with `keep`, from the first bucket to `finish_weight_update`."""
    from vllm.distributed.weight_transfer.nccl_engine import NCCLWeightTransferEngine as Stock

    port = _free_port()
    init = {"master_address": "127.0.0.1", "master_port": port, "rank_offset": 1, "world_size": 2}
    child.order("stock_init", init=init)
    group = Stock.trainer_init({"master_address": "127.0.0.1", "master_port": port, "world_size": 2})
    child.read()
    names = list(child.shapes)
    update = {
        "names": names,
        "dtype_names": ["bfloat16"] * len(names),
        "shapes": [list(child.shapes[name]) for name in names],
        "packed": True,
    }
    taken = []
    for step in range(times + 1):
        change(child, 1000 + step)
        time.sleep(0.3)
        child.gap()
        child.order("stock", update=update)
        child.read()
        began = time.monotonic()
        sender = threading.Thread(
            target=lambda: Stock.trainer_send_weights(
                iter(child.weights.items()), {"group": group, "packed": True}
            )
        )
        sender.start()
        child.read()
        seconds = time.monotonic() - began
        sender.join()
        child.read()
        time.sleep(0.2)
        gap = child.gap()
        size = sum(w.nbytes for w in child.weights.values()) / 1e9
        print(
            f"{child.size} stock {step}: {seconds * 1e3:.1f} ms, gap {gap * 1e3:.1f} ms, {size / seconds:.1f} GB/s",
            flush=True,
        )
        taken.append((seconds, gap))
    seconds, gap = (statistics.median(column) for column in zip(*taken[1:], strict=True))
    return Row(child.size, "stock vLLM, packed", size, seconds, gap * 1e3)


def _free_port() -> int:
    """For the stock engine, which wants to be told one."""
    import socket

    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


async def measure(sizes: list[str], times: int) -> tuple[float, list[Row]]:
    """Start all workers at once, then measure one after another; (raw GB/s, rows)."""
    torch.cuda.set_device(DEVICE)
    meeting = Meeting("127.0.0.1")
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = [stack.enter_context(worker(size, folder)) for size in sizes]
        alone = torch.cuda.device_count() == 1
        raw = copy_rate() if alone else await asyncio.to_thread(raw_rate, meeting)
        print(f"raw {'copy' if alone else 'NCCL broadcast'} of 256 MiB: {raw:.1f} GB/s", flush=True)
        print(f"device checksum of 256 MiB: {fold_rate():.0f} GB/s", flush=True)
        for child in children:
            ready = child.read()
            child.address = ready["address"]
            print(f"{child.size}: engine up in {ready['start_s']:.0f} s", flush=True)
        for child in children:
            try:
                rows += await ours(child, meeting, times)
                if not alone:  # NCCL takes no two ranks on one GPU
                    rows.append(await asyncio.to_thread(stock, child, times))
            except Exception as error:  # noqa: BLE001  the other sizes are still worth their measure
                print(f"{child.size} FAILED: {error!r}\n{child.log.read_text()[-3000:]}", flush=True)
            child.weights.clear()
            torch.cuda.empty_cache()
        for child in children:
            lines = [line for line in child.log.read_text(errors="replace").splitlines() if "refit" in line]
            print(f"{child.size} log: " + " | ".join(lines[:6]), flush=True)
    return raw, rows
