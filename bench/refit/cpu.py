"""This host's CPU: the shared-memory transport against memcpy, and a broadcast in a process group; no engine."""

from __future__ import annotations

import itertools
import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from omnifleet.types import WeightVersion
from omnifleet.wire.manifest import manifest_body
from omnifleet_refit.group import Group, Meeting
from omnifleet_refit.windows import View
from omnifleet_rollout.refit.buckets import Memory, layout, made_whole
from omnifleet_rollout.refit.collective import Collective
from omnifleet_rollout.refit.filling import fill
from omnifleet_rollout.refit.pieces import legs_of
from omnifleet_rollout.refit.shadow import read_transfer
from omnifleet_trainer.refit.parts import Cut, cut_shipment, parts_of, told
from omnifleet_trainer.refit.release import first_release
from omnifleet_trainer.refit.snapshot import Snapshot

CPU = torch.device("cpu")
TENSORS, SHAPE = 16, (1024, 1024)


def measure(times: int) -> list[tuple[str, float]]:
    """(what, GB/s), medians; 64 MiB of float32 in 16 tensors."""
    weights = {f"layer.{i}": torch.randn(SHAPE) for i in range(TENSORS)}
    size = sum(w.nbytes for w in weights.values())
    into = {name: torch.empty_like(w) for name, w in weights.items()}
    rows = [("memcpy", _rate(lambda: [into[n].copy_(w) for n, w in weights.items()], size, times))]

    def packed() -> None:
        first_release(
            WeightVersion("bench", "a", 0), weights.items(), Path("/dev/shm"), 64 << 20
        ).base.retire()

    rows.append(("shm: pack, BLAKE3 of buckets and tensors", _rate(packed, size, times)))
    release = first_release(WeightVersion("bench", "a", 0), weights.items(), Path("/dev/shm"), 64 << 20)
    body, path = manifest_body(release.complete().manifest), release.base.path
    rows.append(("shm: copy and verify", _rate(lambda: read_transfer(body, path), size, times)))
    rows.append(("shm: copy only", _rate(lambda: _copy(path), size, times)))
    release.base.retire()
    for receivers in (1, 3):
        rows.append((f"group of {receivers}: broadcast and verify", _group(weights, receivers, times, True)))
        rows.append((f"group of {receivers}: broadcast only", _group(weights, receivers, times, False)))
    rows.append(("two engines of two ranks, whole: broadcast and verify", _group(weights, 4, times, True)))
    rows.append(("two engines of two ranks, in parts: cut, send and verify", _parts(weights, times)))
    rows += _steps(weights, size, times)
    return rows


def _copy(path: Path) -> bytearray:
    return bytearray(path.read_bytes())


def _group(weights: dict[str, torch.Tensor], receivers: int, times: int, verified: bool) -> float:
    snapshot, meeting = Snapshot(CPU, 16 << 20, verified=verified), Meeting("127.0.0.1")
    snapshot.pack(weights.items(), weights)
    shipment = snapshot.shipment(WeightVersion("bench", "a", 0), None, None, True)
    body, size = manifest_body(shipment.manifest), 1 + receivers
    seats = f"group://127.0.0.1:{meeting.port}/bench?size={size}&deadline_s=60&rank="
    others = [Collective(Memory(CPU)) for _ in range(receivers)]
    group = None

    def once() -> None:
        nonlocal group
        threads = [
            threading.Thread(target=other.receive, args=(body, seats + str(rank)))
            for rank, other in enumerate(others, 1)
        ]
        for thread in threads:
            thread.start()
        group = group or meeting.open_group("bench", size, CPU, 60)
        group.await_ready(time.monotonic() + 60)
        for bucket in shipment.buckets:
            group.broadcast(snapshot.buckets[bucket], time.monotonic() + 60)
        for thread in threads:
            thread.join()

    rate = _rate(once, shipment.bytes, times)
    for other in others:
        other.cancel()
    if group is not None:
        group.abort()
    return rate


def _parts(weights: dict[str, torch.Tensor], times: int) -> float:
    """GB/s of whole weights to two engines, each rank of which reads half of the rows of every tensor."""
    snapshot, meeting = Snapshot(CPU, 16 << 20), Meeting("127.0.0.1")
    snapshot.pack(weights.items(), weights)
    halves = [{name: (View.of(w.chunk(2)[rank]),) for name, w in weights.items()} for rank in range(2)]
    parts = parts_of(snapshot, weights.keys(), halves)
    version = WeightVersion("bench", "a", 0)
    shipment = cut_shipment(snapshot, version, None, weights.keys(), parts, told(snapshot, parts), True)
    body = manifest_body(shipment.manifest)
    others = [Collective(Memory(CPU), rank) for _ in range(2) for rank in range(2)]
    legs = [legs_of(body, rank, halves[rank]) for _ in range(2) for rank in range(2)]
    groups: list[Group] = []

    def once() -> None:
        threads = [
            threading.Thread(
                target=other.receive_legs,
                args=(
                    body,
                    f"group://127.0.0.1:{meeting.port}/parts?size=3&deadline_s=60&rank={1 + i // 2}",
                    legs[i],
                ),
            )
            for i, other in enumerate(others)
        ]
        for thread in threads:
            thread.start()
        for number, part in enumerate(parts):
            if number == len(groups):
                groups.append(meeting.open_group(f"parts.{number}", 3, CPU, 60))
            groups[number].await_ready(time.monotonic() + 60)
            for bucket in Cut(part, snapshot, CPU):
                groups[number].broadcast(bucket, time.monotonic() + 60)
        for thread in threads:
            thread.join()

    rate = _rate(once, sum(w.nbytes for w in weights.values()), times)
    for other in others:
        other.cancel()
    for group in groups:
        group.abort()
    return rate


def _steps(weights: dict[str, torch.Tensor], size: int, times: int) -> list[tuple[str, float]]:
    """GB/s of whole weights where one value in a hundred changed: packed with a step, and made whole of it."""
    snapshot, memory = Snapshot(CPU, 16 << 20), Memory(CPU)
    other = {name: w.clone() for name, w in weights.items()}
    for w in other.values():
        w.view(-1)[::100] += 1
    turns = itertools.cycle([weights, other])
    version = WeightVersion("bench", "a", 0)
    snapshot.pack(next(turns).items(), weights)

    def pack() -> None:
        snapshot.pack(next(turns).items(), weights, sparse=True)

    packed = _rate(pack, size, times)
    assert snapshot.step is not None
    shipment = snapshot.step_on(version, version, snapshot.step.since, False)
    assert shipment is not None
    body, contents = manifest_body(shipment.manifest), snapshot.contents(shipment)
    held = weights if torch.equal(snapshot.tensor("layer.0"), other["layer.0"]) else other
    buckets = layout(body)

    def whole() -> None:
        buffers = memory.take([len(data) for data in contents], sum(made_whole(body).values()))
        for buffer, data in zip(buffers, contents, strict=True):
            buffer.copy_(data)
        fill(body, memory.cut(buckets, buffers), held.__getitem__, memory)

    return [
        (
            f"step of 1 % of the values ({100 * shipment.bytes / size:.1f} % of the bytes): pack, compare, encode",
            packed,
        ),
        ("the same: made whole and verified", _rate(whole, size, times)),
    ]


def _rate(step: Callable[[], object], size: int, times: int) -> float:
    step()
    taken = []
    for _ in range(times):
        began = time.monotonic()
        step()
        taken.append(time.monotonic() - began)
    return size / statistics.median(taken) / 1e9
