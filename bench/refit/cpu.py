"""This host's CPU: the shared-memory transport against memcpy, and a broadcast in a process group; no engine."""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from omnifleet.types import WeightVersion
from omnifleet.wire.manifest import manifest_body
from omnifleet_refit.group import Meeting
from omnifleet_rollout.refit.buckets import Memory
from omnifleet_rollout.refit.collective import Collective
from omnifleet_rollout.refit.shadow import read_transfer
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


def _rate(step: Callable[[], object], size: int, times: int) -> float:
    step()
    taken = []
    for _ in range(times):
        began = time.monotonic()
        step()
        taken.append(time.monotonic() - began)
    return size / statistics.median(taken) / 1e9
