"""What the ledger costs a sample, and whether that grows with the run: `python bench/trainer/ledger.py [--samples N]`.

Groups of 16 samples of 256 tokens go the whole way (lease, record, consume); every 32 groups are a step. The cost of the
last tenth is held against that of the first: the account must not slow down as it grows.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.progress import track
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

SAMPLES, TOKENS, GROUPS = 16, 256, 32
PROMPT = list(range(400))


def group_of(lease: PromptLease, step: int, chance: random.Random) -> Group:
    """A group as the loop records it: random tokens and logprobs, since those compress as real ones do."""
    version = WeightVersion("bench", "a", step, "c" * 64)
    digest = token_digest(PROMPT)
    trajectories = [
        Trajectory(
            id=f"{lease.attempt}/{index}",
            identity=Identity("bench", prompt_id=lease.prompt_id, sample=index, attempt=lease.attempt),
            prompt_token_ids=PROMPT,
            prompt_hash=digest,
            token_ids=[chance.randrange(150_000) for _ in range(TOKENS)],
            logprobs=[-chance.random() for _ in range(TOKENS)],
            spans=[VersionSpan(version, 0, TOKENS, "worker-0")],
            logprobs_mode=LogprobsMode.PROCESSED,
            finish_reason=FinishReason.STOP,
            text="x" * TOKENS * 4,
            media=(MediaRef(MediaKind.IMAGE, Digest("ab" * 32)),),
            reward=chance.random(),
            reward_version="exact@1",
            components={"exact@1": 1.0},
        )
        for index in range(SAMPLES)
    ]
    return Group(lease.attempt, lease.prompt_id, trajectories)


def run(path: Path, samples: int, keep_steps: int) -> tuple[list[float], float, float]:
    """Seconds a sample of each step; of each retention pass, and of the processor for a sample, on average.

    Making the groups is not timed.
    """
    ledger = SqliteLedger(path, owner="bench")
    ledger.roll_back_to(0, "a")
    chance, costs, passes = random.Random(0), [], []
    steps = samples // (SAMPLES * GROUPS)
    busy = 0.0
    for step in track(
        range(1, steps + 1), f"{samples:,} samples", console=Console(stderr=True), transient=True
    ):
        began = time.perf_counter()
        ledger.add_epoch(step - 1, [f"p{n}" for n in range(GROUPS)])
        leases = ledger.lease_next(GROUPS, version=step - 1, ttl_s=60)
        spent = time.perf_counter() - began
        for lease in leases:
            group = group_of(lease, step - 1, chance)
            began, cpu = time.perf_counter(), time.process_time()
            ledger.record_group(lease, group)
            spent += time.perf_counter() - began
            busy += time.process_time() - cpu
        began = time.perf_counter()
        ready = [group.id for group in ledger.ready()]
        ledger.consume(ready, step=step, version=step - 1)
        costs.append((spent + time.perf_counter() - began) / (SAMPLES * GROUPS))
        if keep_steps and step % 10 == 0:
            began = time.perf_counter()
            ledger.forget_payloads(step - keep_steps)
            passes.append(time.perf_counter() - began)
    ledger.close()
    return costs, sum(passes) / max(1, len(passes)), busy / (steps * SAMPLES * GROUPS)


def main() -> None:
    """Print one table."""
    asked = argparse.ArgumentParser()
    asked.add_argument("--samples", type=int, default=100_000)
    samples = asked.parse_args().samples
    table = Table(
        "retention",
        "samples",
        "ms a sample",
        "of it CPU",
        "first tenth",
        "last tenth",
        "bytes a sample",
        "count() s",
        "pass s",
    )
    for keep in (0, 20):
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "ledger.sqlite"
            costs, spent, busy = run(path, samples, keep)
            began = time.perf_counter()
            counts = LedgerReader(path).counts()
            counting = time.perf_counter() - began
            assert counts.consumed == counts.trajectories and not counts.lost
            tenth = max(1, len(costs) // 10)
            table.add_row(
                f"{keep} steps" if keep else "all",
                f"{counts.trajectories:,}",
                f"{1e3 * sum(costs) / len(costs):.3f}",
                f"{1e3 * busy:.3f}",
                f"{1e3 * sum(costs[:tenth]) / tenth:.3f}",
                f"{1e3 * sum(costs[-tenth:]) / tenth:.3f}",
                f"{path.stat().st_size / counts.trajectories:.0f}",
                f"{counting:.2f}",
                f"{spent:.3f}",
            )
    Console().print(table)


if __name__ == "__main__":
    main()
