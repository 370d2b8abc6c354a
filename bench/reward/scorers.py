"""How many items a core scores in a second, what the process pool costs, and what one poisonous reply costs the others.

python bench/reward/scorers.py            # the three tables
python bench/reward/scorers.py --quick    # fewer items
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.telemetry.counters import Counters
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply
from omnifleet_reward.service import RewardService

LIMIT_S = 2.0
THINK = "<think>" + "First I count the cubes, then the spheres. " * 20 + "</think>\n"
TOWER = r"\boxed{\frac{7^{7^{7^{7^{7}}}}-7}{12}}"
OPTIONS = {"options": [{"A": "a cat"}, {"B": "a dog"}, {"C": "a cow"}]}


@dataclass(frozen=True)
class Case:
    """A scorer with a typical reply; `{n}` in it is the item's number, so that no two items are alike."""

    name: str
    scorer: str
    reply: str
    truth: str
    params: dict[str, Any]
    extra: dict[str, Any]

    def replies(self, count: int) -> list[Reply]:
        """`count` replies, no two alike."""
        return [
            Reply(self.reply.replace("{n}", str(n)), self.truth, extra=self.extra)
            for n in range(1, count + 1)
        ]

    @property
    def config(self) -> ScorerConfig:
        """The scorer with its parameters."""
        return ScorerConfig(name=self.scorer, params=self.params)


CASES = [
    Case("format", "format", THINK + "<answer>{n}</answer>", "3", {}, {}),
    Case("strict_format", "strict_format", THINK + "<answer>{n}</answer>", "3", {}, {}),
    Case("exact_alnum", "exact_alnum", THINK + "<answer>{n}</answer>", "3", {}, {}),
    Case("exact_text", "exact_text", THINK + "<answer>{n}</answer>", "3", {}, {}),
    Case("numeric", "numeric", THINK + "<answer>{n} cm</answer>", "3", {"relative": 0.01}, {}),
    Case("bbox_giou", "bbox_giou", THINK + "<answer>[{n},2,300,400]</answer>", "[1,2,300,400]", {}, {}),
    Case("mcqa", "mcqa", THINK + "{n} \\boxed{B}", "B", {}, OPTIONS),
    Case("click", "click", THINK + "click({n}, 400)", '{"x": 5, "y": 400, "radius": 60}', {}, {}),
    Case("regex", "regex", THINK + "Answer: {n}", "3", {"pattern": r"Answer: (\d+)", "group": 1}, {}),
    Case("json_schema", "json_schema", '{"x": {n}}', "", {"document_schema": {"type": "object"}}, {}),
    Case("math_expr, numbers", "math_expr", THINK + "<answer>{n}/7</answer>", "3/7", {}, {}),
    Case("math_expr, roots", "math_expr", THINK + "<answer>{n}\\sqrt{2}</answer>", "\\sqrt{18}", {}, {}),
    Case("geo3k, numbers", "geo3k", THINK + "\\boxed{{n}}", "3", {}, {}),
]
POISONS = [
    Case("power tower", "math_expr", TOWER, "4", {"places": ["box"]}, {}),
    Case("1 MB of brackets", "math_expr", "\\boxed{" + "(" * (1 << 20) + "}", "4", {"places": ["box"]}, {}),
    Case("catastrophic pattern", "regex", "a" * 64 + "!", "", {"pattern": "(a+)+$"}, {}),
]


@asynccontextmanager
async def service(processes: int) -> AsyncIterator[RewardService]:
    config = RewardConfig(processes=processes, item_timeout_s=LIMIT_S, queue_items=1 << 20)
    async with reward_service(config, Counters("reward")) as made:
        yield made


def alone(case: Case, count: int) -> float:
    """Items a CPU second in this process, without pool or wire."""
    (term,) = Registry().reward([case.config]).terms
    assert term.scorer.judge is not None
    if term.scorer.prepare is not None:
        term.scorer.prepare()
    replies = case.replies(count)
    term.scorer.judge(replies[0], term.params)
    started = time.process_time()
    for reply in replies:
        term.scorer.judge(reply, term.params)
    return count / max(time.process_time() - started, 1e-9)


async def through_pool(made: RewardService, case: Case, count: int) -> float:
    """Microseconds of wall time an item through the service with one process."""
    replies = case.replies(count)
    await made.score([case.config], replies[:1])
    started = time.perf_counter()
    await made.score([case.config], replies)
    return 1e6 * (time.perf_counter() - started) / count


async def latencies(made: RewardService, cases: Sequence[Case], others: int) -> tuple[str, float, float]:
    """One reply of the first case, then `others` harmless ones behind it: its mark, and seconds that the last of the
    others and the poisoned one took."""
    harmless = Case("harmless", "math_expr", "<answer>{n}/7</answer>", "3/7", {}, {})

    async def timed(case: Case, reply: Reply) -> tuple[float, str]:
        started = time.perf_counter()
        (scored,), _ = await made.score([case.config], [reply])
        mark = str(scored.total.mark) if scored.error is None else str(scored.error.reason)
        return time.perf_counter() - started, mark

    poisoned = [asyncio.create_task(timed(case, case.replies(1)[0])) for case in cases]
    await asyncio.sleep(0)
    rest = await asyncio.gather(*(timed(harmless, reply) for reply in harmless.replies(others)))
    own_s, mark = await poisoned[0] if poisoned else (0.0, "")
    return mark, own_s, max(seconds for seconds, _ in rest)


async def main(quick: bool) -> dict[str, Any]:
    found: dict[str, Any] = {"scorers": {}, "poison": {}}
    print(f"{'':24}{'items/s/core':>14}{'alone, µs':>12}{'pool, µs':>12}{'overhead, µs':>14}")
    async with service(1) as made:
        for case in CASES:
            count = (50 if quick else 400) if "roots" in case.name else (1000 if quick else 5000)
            rate = statistics.median(alone(case, count) for _ in range(3))
            pool_us = min([await through_pool(made, case, count) for _ in range(3)])
            alone_us = 1e6 / rate
            found["scorers"][case.name] = {"per_second": rate, "alone_us": alone_us, "pool_us": pool_us}
            print(f"{case.name:24}{rate:14,.0f}{alone_us:12.1f}{pool_us:12.1f}{pool_us - alone_us:14.1f}")
    print(f"\none process, limit {LIMIT_S:g} s an item, 200 harmless items behind the poison")
    print(f"{'':24}{'mark':>14}{'its own, s':>12}{'last other, s':>15}{'delay, s':>10}")
    async with service(1) as made:
        await latencies(made, [], 10)
        _, _, calm = await latencies(made, [], 200)
        print(f"{'(none)':24}{'':>14}{'':>12}{calm:15.3f}{0.0:10.3f}")
        for case in POISONS:
            await asyncio.sleep(5 if not quick else 3)  # the spare is made again
            mark, own_s, last_s = await latencies(made, [case], 200)
            found["poison"][case.name] = {"mark": mark, "own_s": own_s, "delay_s": last_s - calm}
            print(f"{case.name:24}{mark:>14}{own_s:12.3f}{last_s:15.3f}{last_s - calm:10.3f}")
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", default="", help="File for the numbers.")
    arguments = parser.parse_args()
    numbers = asyncio.run(main(arguments.quick))
    if arguments.json:
        with open(arguments.json, "w") as out:
            json.dump(numbers, out, indent=1)
