"""What the ledger costs a sample, and whether that grows with the run.

`python bench/trainer/ledger.py [--samples N] [--tokens N] [--keep STEPS]`: groups of 16 samples go the whole way (lease,
record, load, consume); every 32 groups are a step. At 10^4 samples, 10^5 and so on a row says what the last ten steps cost,
what questions about the whole account take, and how large the file is. Making the groups is not timed.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
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

SAMPLES, GROUPS = 16, 32
STEP = SAMPLES * GROUPS
PROMPT = list(range(400))
LAST, PASS_EVERY = 10, 10


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


def main() -> None:
    """Print one table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--samples", type=int, default=100_000)
    asked.add_argument("--tokens", type=int, default=256, help="of a reply")
    asked.add_argument("--keep", type=int, default=0, help="steps whose payloads stay; 0: all")
    given = asked.parse_args()
    table = Table(
        "samples", "ms a sample", "of it CPU", "of it load", "bytes a sample", "MB", "count() s", "pass ms"
    )
    marks = [10**power // STEP for power in range(4, 8) if 10**power < given.samples] + [
        given.samples // STEP
    ]
    chance, last = random.Random(0), list[Cost]()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ledger.sqlite"
        ledger = SqliteLedger(path, owner="bench")
        ledger.roll_back_to(0, "a")
        for step in range(1, marks[-1] + 1):
            last = [*last[-LAST + 1 :], one_step(ledger, step, given.tokens, given.keep, chance)]
            if step in marks:
                table.add_row(*row_of(path, step, last))
        ledger.close()
    Console(width=120).print(table)


if __name__ == "__main__":
    main()
