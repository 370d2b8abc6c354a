"""What the ledger costs a sample, and whether that grows with the run.

`python bench/trainer/ledger.py [--sizes N ...] [--tokens N] [--keep STEPS]`: for each size a ledger is filled by plain SQL with
rows as they are after that many samples (their payloads gone, as retention leaves them, or with --keep 0 there). Then ten steps
of 32 groups of 16 samples go the whole way (lease, record, load, consume), and questions about the whole account are asked.
Making the groups is not timed.
"""

from __future__ import annotations

import argparse
import random
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from omnifleet.address import token_digest
from omnifleet.types import (
    Digest,
    FinishReason,
    Group,
    Identity,
    LogprobsMode,
    MediaKind,
    MediaRef,
    Trajectory,
    VersionSpan,
    WeightVersion,
)
from omnifleet_trainer.ledger import LedgerReader, PromptLease, SqliteLedger
from omnifleet_trainer.ledger.codec import pack_trajectory

SAMPLES, GROUPS = 16, 32
STEP = SAMPLES * GROUPS
PROMPT = list(range(400))
LAST, PASS_EVERY = 10, 5


@dataclass(frozen=True)
class Cost:
    """Of one step, seconds. A retention pass is in `keeping`, not in `wall`."""

    wall: float
    cpu: float
    load: float
    keeping: float


def group_of(lease: PromptLease, step: int, tokens: int, chance: random.Random) -> Group:
    """A group as the loop records it: random tokens and logprobs, since those compress as real ones do."""
    version = WeightVersion("bench", "a", step, "c" * 64)
    digest = token_digest(PROMPT)
    trajectories = [
        Trajectory(
            id=f"{lease.attempt}/{index}",
            identity=Identity("bench", prompt_id=lease.prompt_id, sample=index, attempt=lease.attempt),
            prompt_token_ids=PROMPT,
            prompt_hash=digest,
            token_ids=[chance.randrange(150_000) for _ in range(tokens)],
            logprobs=[-chance.random() for _ in range(tokens)],
            spans=[VersionSpan(version, 0, tokens, "worker-0")],
            logprobs_mode=LogprobsMode.PROCESSED,
            finish_reason=FinishReason.STOP,
            text="x" * tokens * 4,
            media=(MediaRef(MediaKind.IMAGE, Digest("ab" * 32)),),
            reward=chance.random(),
            reward_version="exact@1",
            components={"exact@1": 1.0},
        )
        for index in range(SAMPLES)
    ]
    return Group(lease.attempt, lease.prompt_id, trajectories)


class Clock:
    """Wall and processor time of what runs inside `timing`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 0.0

    @contextmanager
    def timing(self) -> Iterator[None]:
        """Add the block's time."""
        wall, cpu = time.perf_counter(), time.process_time()
        yield
        self.wall += time.perf_counter() - wall
        self.cpu += time.process_time() - cpu


def one_step(ledger: SqliteLedger, step: int, tokens: int, keep: int, chance: random.Random) -> Cost:
    """Lease, record, load and consume one step's groups; every so often a retention pass."""
    clock, loading, keeping = Clock(), Clock(), Clock()
    with clock.timing():
        ledger.add_epoch(step - 1, [f"p{n}" for n in range(GROUPS)])
        leases = ledger.lease_next(GROUPS, version=step - 1, ttl_s=60)
    for lease in leases:
        group = group_of(lease, step - 1, tokens, chance)
        with clock.timing():
            ledger.record_group(lease, group)
    with clock.timing():
        ready = [group.id for group in ledger.ready()]
        with loading.timing():
            for id in ready:
                ledger.load_group(id)
        ledger.consume(ready, step=step, version=step - 1)
    if keep and step % PASS_EVERY == 0:
        with keeping.timing():
            ledger.forget_payloads(step - keep)
    return Cost(clock.wall, clock.cpu, loading.wall, keeping.wall)


def fill(path: Path, steps: int, payload: bytes) -> None:
    """`steps` consumed steps: what `one_step` would have left, without its work."""
    db = sqlite3.connect(path)
    for step in range(1, steps + 1):
        ids = [uuid.uuid4().hex for _ in range(GROUPS)]
        first = (step - 1) * GROUPS + 1
        spans = f'[["a",{step - 1},0,256,"worker-0"]]'
        trajectories = [(f"{id}/{i}", id, i) for id in ids for i in range(SAMPLES)]
        with db:
            db.executemany(
                "INSERT INTO occurrences VALUES (?, ?, ?, ?, 'done', 0, 'scored', NULL)",
                [(first + n, step - 1, n, f"p{n}") for n in range(GROUPS)],
            )
            db.executemany(
                "INSERT INTO attempts VALUES (?, ?, 'a', ?, 'scored', NULL, 0, 1)",
                [(id, first + n, step - 1) for n, id in enumerate(ids)],
            )
            db.executemany(
                "INSERT INTO groups VALUES (?, ?, ?, 'consumed', ?, ?, ?, ?, ?)",
                [
                    (id, first + n, f"p{n}", step - 1, step - 1, SAMPLES, payload and b"x", "ab" * 32)
                    for n, id in enumerate(ids)
                ],
            )
            db.executemany(
                "INSERT INTO trajectories VALUES (?, ?, ?, 0.5, 256, ?, 'exact@1', ?)",
                [(*row, payload, spans) for row in trajectories],
            )
            db.executemany(
                "INSERT INTO consumptions VALUES (?, 'a', ?, ?, NULL)",
                [(id, step, step - 1) for id, _, _ in trajectories],
            )
    db.close()


def row_of(path: Path, step: int, last: list[Cost]) -> list[str]:
    """What the table says at this size."""
    samples, steps = step * STEP, len(last)
    began = time.perf_counter()
    counts = LedgerReader(path).counts()
    counting = time.perf_counter() - began
    assert counts.consumed == counts.trajectories == samples and not counts.lost
    size = path.stat().st_size + path.with_name(path.name + "-wal").stat().st_size
    passes = [cost.keeping for cost in last if cost.keeping]
    return [
        f"{samples:,}",
        f"{1e3 * sum(cost.wall for cost in last) / steps / STEP:.3f}",
        f"{1e3 * sum(cost.cpu for cost in last) / steps / STEP:.3f}",
        f"{1e3 * sum(cost.load for cost in last) / steps / STEP:.3f}",
        f"{size / samples:.0f}",
        f"{size / 2**20:.0f}",
        f"{counting:.2f}",
        f"{1e3 * sum(passes) / len(passes):.0f}" if passes else "",
    ]


def measured(folder: Path, samples: int, tokens: int, keep: int) -> list[str]:
    """One row: a ledger that grows to `samples`."""
    path, steps, chance = folder / f"{samples}.sqlite", samples // STEP, random.Random(0)
    ledger = SqliteLedger(path, owner="bench")
    ledger.roll_back_to(0, "a")
    lease = PromptLease("a", 0, 0, 0, "p", 0)
    payload = b"" if keep else pack_trajectory(group_of(lease, 0, tokens, chance).trajectories[0])
    ledger.close()
    fill(path, steps - LAST, payload)
    ledger = SqliteLedger(path, owner="bench")
    last = [one_step(ledger, step, tokens, keep, chance) for step in range(steps - LAST + 1, steps + 1)]
    row = row_of(path, steps, last)
    ledger.close()
    return row


def main() -> None:
    """Print one table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--sizes", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    asked.add_argument("--tokens", type=int, default=256, help="of a reply")
    asked.add_argument("--keep", type=int, default=5, help="steps whose payloads stay; 0: all")
    given = asked.parse_args()
    table = Table(
        "samples", "ms a sample", "of it CPU", "of it load", "bytes a sample", "MB", "count() s", "pass ms"
    )
    with tempfile.TemporaryDirectory() as folder:
        for size in given.sizes:
            table.add_row(*measured(Path(folder), size, given.tokens, given.keep))
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
