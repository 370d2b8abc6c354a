"""The trainer's half here on the first GPU, a worker with a vLLM engine for each size on others, or on this one too.

Transport `nccl`: engines on the last GPUs, beside a raw NCCL broadcast. `cuda_ipc`: on the first ones, beside a copy to the last of
them. Ranks of an engine of several are sent slices, or cut them out of what is lent, from the second refit on.
"""

from __future__ import annotations

import asyncio
import os
import statistics
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from child import DEVICE, Child, Row, Setup, change, worker
from phases import Phases, timeline
from rates import copy_rate, fold_rate, raw_rate
from stock import stock

from omnifleet.client.refit import RefitClient
from omnifleet.errors import OmnifleetError
from omnifleet.types import InFlight, WeightVersion
from omnifleet_refit.group import Group, Meeting
from omnifleet_refit.windows import Needs, needs_of
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.courier import Courier, Leg, Order, Outcome
from omnifleet_trainer.refit.lender import lend, places_of
from omnifleet_trainer.refit.parts import Cut
from omnifleet_trainer.refit.snapshot import Shipment, Snapshot

PHASES_ENV = "OMNIFLEET_BENCH_PHASES"
"""Set: also print when each step of a refit began and ended, of the sender (`await_ready`, `finish`) and of the worker."""
DEADLINE_S = 60.0


async def send(
    client: RefitClient, shipment: Shipment, snapshot: Snapshot, courier: Courier, setup: Setup
) -> Outcome:
    """Stage on the worker; `courier.began` is when the first bucket was there to be taken."""
    buckets = snapshot.contents(shipment)
    if setup.transport == "nccl":
        parts = [Leg(Cut(part, snapshot, DEVICE), part.ranks, part) for part in shipment.parts]
        orders = {"w": Order(client, shipment, setup.tp)}
        return (await courier.stage_legs(orders, parts or [Leg(buckets)], DEADLINE_S))["w"]
    source = lend(snapshot.buckets if shipment.parts else buckets, places_of(snapshot, shipment))
    courier.began = time.monotonic()
    return await client.stage(shipment.manifest, source, deadline_s=DEADLINE_S)


async def read_needs(client: RefitClient, setup: Setup) -> list[Needs]:
    """What the ranks read of each tensor, once their plan is checked; nothing for one rank."""
    return [needs_of(body) for body in (await client.needs())[1]] if setup.tp > 1 else []


async def ours(child: Child, meeting: Meeting, times: int, setup: Setup) -> list[Row]:
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
                needs = await read_needs(client, setup)
                began = time.monotonic()
                snapshot.pack(child.weights.items(), child.weights)
                takers = {"w": Taker(parent, {} if parent else None, sparse=False)}  # all has changed
                version = WeightVersion("bench", "a", number)
                shipment = choose(snapshot, version, takers, needs, False)["w"]
                torch.cuda.synchronize(DEVICE)
                packed = time.monotonic() - began
                await asyncio.sleep(0.3)
                child.gap()
                sending.taken()
                began = time.monotonic()
                outcome = await send(client, shipment, snapshot, courier, setup)
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
            name += f", {setup.tp} ranks, {'slices' if shipment.parts else 'whole'}" * (setup.tp > 1)
            rows.append(
                Row(child.size, name, shipment.bytes / 1e9, seconds, gap * 1e3, commit_s * 1e3, pack * 1e3)
            )
    return rows


async def measure(sizes: list[str], times: int, setup: Setup) -> tuple[float, list[Row]]:
    """Start all workers at once, then measure one after another; (raw GB/s, rows)."""
    torch.cuda.set_device(DEVICE)
    meeting = Meeting("127.0.0.1")
    rows: list[Row] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        children = [stack.enter_context(worker(size, folder, setup)) for size in sizes]
        lent = setup.transport == "cuda_ipc"
        last = torch.device("cuda", setup.gpus[-1])
        raw = copy_rate(last) if lent else await asyncio.to_thread(raw_rate, meeting)
        print(f"raw {f'copy to {last}' if lent else 'NCCL broadcast'} of 256 MiB: {raw:.1f} GB/s", flush=True)
        print(f"device checksum of 256 MiB: {fold_rate():.0f} GB/s", flush=True)
        for child in children:
            ready = child.read()
            child.address = ready["address"]
            print(f"{child.size}: engine up in {ready['start_s']:.0f} s", flush=True)
        for child in children:
            try:
                rows += await ours(child, meeting, times, setup)
                if not lent:  # NCCL takes no two ranks on one GPU
                    rows.append(await asyncio.to_thread(stock, child, times, setup.tp))
            except Exception as error:  # noqa: BLE001  the other sizes are still worth their measure
                print(f"{child.size} FAILED: {error!r}\n{child.log.read_text()[-3000:]}", flush=True)
            child.weights.clear()
            torch.cuda.empty_cache()
        for child in children:
            lines = [line for line in child.log.read_text(errors="replace").splitlines() if "refit" in line]
            print(f"{child.size} log: " + " | ".join(lines[:6]), flush=True)
    return raw, rows
