"""Scorers that hang, eat memory, crash or lie: the item gets a typed error, the others their scores."""

import asyncio
import importlib
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.pool import Pool
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict
from omnifleet_reward.service import RewardService, Scored
from tests.waiting import until

MODULE = "scorers_under_test"
SOURCE = '''
import os, signal, subprocess, sys, time
from omnifleet_reward.scorer import Reply, Scorer, Verdict

def by_order(reply):
    """Do what the reply says."""
    word, _, rest = reply.response.partition(" ")
    if word == "hang":
        time.sleep(600)
    if word == "tower":  # RWD-09: a checker that never comes back
        return 7 ** 7 ** 7 ** 7 ** 7
    if word == "orphan":
        child = subprocess.Popen(["sleep", "600"])
        open(rest, "w").write(str(child.pid))
        time.sleep(600)
    if word == "eat":
        return float(len(bytearray(8 << 30)))
    if word == "exit":
        os._exit(7)
    if word == "quit":
        sys.exit("no")
    if word == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if word == "raise":
        raise KeyError("missing")
    if word == "nan":
        return float("nan")
    if word == "text":
        return "1.0"
    if word == "print":
        print("noise on stdout", flush=True)
        assert sys.stdin.read() == ""
    if word == "alarm":  # RWD-11: a checker built on signals needs the main thread
        signal.signal(signal.SIGALRM, lambda *_: None)
        signal.setitimer(signal.ITIMER_REAL, 60)
        signal.setitimer(signal.ITIMER_REAL, 0)
        return 2 + 2 == int(reply.ground_truth)
    return float(rest or 1.0)

def wait(reply):
    with open(reply.ground_truth) as gate:  # a named pipe: opens when the test opens it
        return float(gate.read())

VERSIONED = Scorer("x", "3", "A scorer object.", lambda reply, params: Verdict(0.5, True))

def hard(reply, params):
    """Do what the reply says, the hard way."""
    if reply.response == "spin":
        while True:
            pass
    if reply.response == "sleep":
        time.sleep(600)
    if reply.response == "eat":
        return Verdict(float(len(bytearray(8 << 30))))
    if reply.response == "abort":
        os.abort()
    return Verdict(float(reply.response), True)

HARD = Scorer("hard", "1", "Some replies are beyond it.", hard, beyond=-1.0)

async def waits(reply):
    return 1.0
'''


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """An importable module of scorers."""
    (tmp_path / f"{MODULE}.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    monkeypatch.delitem(__import__("sys").modules, MODULE, raising=False)
    return MODULE


@asynccontextmanager
async def serving(module: str, **settings: float) -> AsyncIterator[tuple[RewardService, Counters]]:
    config = RewardConfig.model_validate({"modules": [module], **settings})
    counters = Counters("reward")
    async with reward_service(config, counters) as service:
        yield service, counters


async def scores(
    service: RewardService, *orders: str, function: str = "by_order", truth: str = "4"
) -> list[Scored]:
    replies = [Reply(order, truth) for order in orders]
    return (await service.score([ScorerConfig(name=f"{MODULE}:{function}")], replies))[0]


def reason(scored: Scored) -> Reason | None:
    return scored.error.reason if scored.error else None


async def test_a_bad_item_is_unscorable_and_fails_no_other(module: str) -> None:
    orders = ["x 0.25", "raise", "nan", "text", "exit", "quit", "kill", "x 0.5", "print 0.125", "alarm"]
    async with serving(module) as (service, counters):
        results = await scores(service, *orders)
        reasons = [reason(result) for result in results]
        assert reasons == [None, *[Reason.INTERNAL] * 6, None, None, None]
        assert [result.total.score for result in results if not result.error] == [0.25, 0.5, 0.125, 1.0]
        assert results[-1].total.correct is True
        messages = [result.error.message for result in results if result.error]
        assert "KeyError: 'missing'" in messages[0] and "nan" in messages[1]
        assert "exit code 7" in messages[3] and "SIGKILL" in messages[5]
        assert counters.count("items_unscorable") == counters.count("items_unscorable_internal") == 6
        assert counters.count("processes_replaced") == 3  # for each of exit, quit, kill


@pytest.mark.parametrize("order", ["hang", "tower"])
async def test_a_stuck_scorer_is_killed_at_its_limit_and_replaced(module: str, order: str) -> None:
    async with serving(module, item_timeout_s=1.0) as (service, _):
        started = time.monotonic()
        stuck, fine = await scores(service, order, "x 0.5")
        assert time.monotonic() - started < 60
        assert reason(stuck) is Reason.DEADLINE and stuck.error and stuck.error.knob
        assert stuck.components == () and fine.total.score == 0.5


async def test_what_is_beyond_a_scorer_has_the_score_for_that_and_a_mark(module: str) -> None:
    scorers = [ScorerConfig(name=f"{MODULE}:HARD"), ScorerConfig(name="exact_text")]
    async with serving(module, item_timeout_s=2.0, item_memory_bytes=256 << 20) as (service, counters):
        replies = [Reply(order, order) for order in ("0.5", "spin", "eat", "abort", "0.25")]
        while True:  # a machine too busy to tell who is slow says so
            results, _ = await service.score(scorers, replies)
            if reason(results[1]) is not Reason.DEADLINE:
                break
        parts = [dict(result.components) for result in results]
        assert [part["exact_text@1"] for part in parts] == [Verdict(1.0, True)] * 5
        assert [part[f"{MODULE}:HARD@1"] for part in parts] == [
            Verdict(0.5, True),
            Verdict(-1.0, False, Mark.TIMEOUT),
            Verdict(-1.0, False, Mark.CRASHED),
            Verdict(-1.0, False, Mark.CRASHED),
            Verdict(0.25, True),
        ]
        assert results[1].total == Verdict(0.0, False, Mark.TIMEOUT)
        assert counters.count("items_timeout") >= 1 and counters.count("items_crashed") >= 2


async def test_a_scorer_that_only_waits_was_not_beaten_by_the_reply(module: str) -> None:
    async with serving(module, item_timeout_s=1.0) as (service, _):
        (result,), _ = await service.score([ScorerConfig(name=f"{MODULE}:HARD")], [Reply("sleep", "")])
    assert reason(result) is Reason.DEADLINE and result.error and result.error.retryable
    assert result.total.mark is Mark.TIMEOUT


async def test_a_catastrophic_pattern_costs_its_own_item_only(module: str) -> None:
    scorers = [ScorerConfig(name="regex", params={"pattern": "(a+)+$"})]
    async with serving(module, item_timeout_s=2.0) as (service, counters):
        replies = [Reply("a" * 60 + "!", ""), *(Reply("aa", "") for _ in range(50))]
        while True:
            results, _ = await service.score(scorers, replies)
            if reason(results[0]) is not Reason.DEADLINE:
                break
    assert results[0].total == Verdict(0.0, False, Mark.TIMEOUT)
    assert [result.total.score for result in results[1:]] == [1.0] * 50
    assert counters.count("processes_replaced") >= 1


async def test_memory_is_limited(module: str) -> None:
    async with serving(module, item_memory_bytes=256 << 20, item_timeout_s=20) as (service, _):
        eater, fine = await scores(service, "eat", "x 0.5")
        assert reason(eater) is Reason.LIMIT_EXCEEDED and eater.error
        assert eater.error.knob == "reward_service.item_memory_bytes"
        assert fine.total.score == 0.5


async def test_what_a_stuck_scorer_started_dies_with_it(module: str, tmp_path: Path) -> None:
    written = tmp_path / "pid"
    async with serving(module, item_timeout_s=1.5) as (service, _):
        (stuck,) = await scores(service, f"orphan {written}")
        assert reason(stuck) is Reason.DEADLINE
        await until(lambda: not running(int(written.read_text())))


def running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_request_may_shorten_the_limit_and_not_lengthen_it(module: str) -> None:
    async with serving(module, item_timeout_s=1.0) as (service, _):
        configs = [ScorerConfig(name=f"{MODULE}:by_order")]
        for timeout_s in (0.2, 60.0):  # the service's is 1
            started = time.monotonic()
            (result,), _ = await service.score(configs, [Reply("hang", "")], timeout_s)
            assert reason(result) is Reason.DEADLINE
            assert time.monotonic() - started < 50


async def test_order_is_kept_over_processes(module: str) -> None:
    async with serving(module, processes=2) as (service, _):
        batches = await asyncio.gather(
            *(scores(service, *(f"x {batch}.{item:03d}" for item in range(100))) for batch in range(3))
        )
        for batch, results in enumerate(batches):
            assert [r.total.score for r in results] == [float(f"{batch}.{item:03d}") for item in range(100)]


async def test_items_sent_ahead_of_a_dying_process_are_judged_by_the_next(module: str) -> None:
    async with serving(module, item_timeout_s=60) as (service, counters):
        await scores(service, *["x 0.5"] * 50)  # quick ones, so that many are sent ahead
        orders = [order for n in range(6) for order in (f"x 0.{n + 1}", "x 1", "exit", "x 2", "raise")]
        results = await scores(service, *orders)
        expected = [value for n in range(6) for value in (float(f"0.{n + 1}"), 1.0, None, 2.0, None)]
        assert [None if result.error else result.total.score for result in results] == expected
        assert counters.count("processes_replaced") == 6


async def test_a_reply_that_cannot_be_sent_is_that_items_error(module: str) -> None:
    async with serving(module) as (service, counters):
        replies = [Reply("x 0.5", ""), Reply("x", "", extra={"n": float("nan")}), Reply("x 0.25", "")]
        results, _ = await service.score([ScorerConfig(name=f"{MODULE}:by_order")], replies)
        assert [reason(result) for result in results] == [None, Reason.INVALID_REQUEST, None]
        assert counters.snapshot()["items_waiting"] == 0


async def test_the_queue_is_bounded(module: str, tmp_path: Path) -> None:
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    async with serving(module, queue_items=4, item_timeout_s=30) as (service, counters):
        with pytest.raises(OmnifleetError) as never:
            await scores(service, *["x"] * 5)
        assert never.value.reason is Reason.LIMIT_EXCEEDED and not never.value.retryable
        blocked = asyncio.create_task(scores(service, "x", function="wait", truth=str(gate)))
        await until(lambda: counters.snapshot()["processes_busy"] > 0)
        queued = asyncio.create_task(scores(service, *["x"] * 3))
        await until(lambda: counters.snapshot()["items_waiting"] == 3)
        with pytest.raises(OmnifleetError) as later:
            await scores(service, "x", "x")
        assert (
            later.value.reason is Reason.OVERLOADED
            and later.value.retryable
            and later.value.retry_after_ms > 0
        )
        queued.cancel()  # a caller that went away is not served
        await asyncio.to_thread(gate.write_text, "0.25")
        assert (await blocked)[0].total.score == 0.25
        assert (await scores(service, *["x"] * 4))[3].total.score == 1.0
        assert counters.snapshot()["items_waiting"] == 0


async def test_closing_ends_items_and_processes(module: str) -> None:
    async with serving(module, item_timeout_s=60) as (service, counters):
        stuck = asyncio.create_task(scores(service, "hang", "x"))
        await until(lambda: counters.snapshot()["processes_busy"] > 0)
    assert [reason(result) for result in await stuck] == [Reason.UNAVAILABLE] * 2


async def test_versions_of_custom_scorers(module: str, tmp_path: Path) -> None:
    registry = Registry([module])
    assert registry.find(f"{module}:VERSIONED").label == f"{module}:VERSIONED@3"
    assert {s.name for s in registry.known()} >= {
        "format",
        "exact_alnum",
        f"{module}:by_order",
        f"{module}:VERSIONED",
    }
    with pytest.raises(OmnifleetError, match="coroutines are none"):
        registry.find(f"{module}:waits")
    version = registry.find(f"{module}:by_order").version
    (tmp_path / f"{MODULE}.py").write_text(SOURCE + "# changed\n")
    assert Registry([module]).find(f"{module}:by_order").version != version


async def test_a_maximum_that_nobody_knows_is_not_guessed(module: str) -> None:
    async with serving(module) as (service, _):
        clevr = [ScorerConfig(name="format", weight=0.2), ScorerConfig(name="exact_alnum", weight=0.8)]
        assert (await service.reachable(clevr, "<think>\n")).maximum == pytest.approx(0.95)
        with pytest.raises(OmnifleetError) as caught:
            await service.reachable([*clevr, ScorerConfig(name=f"{module}:by_order")], "")
        assert caught.value.reason is Reason.UNSUPPORTED


async def test_a_process_that_cannot_start_is_an_error_of_the_service() -> None:
    with pytest.raises(OmnifleetError) as caught:
        async with Pool(RewardConfig(modules=("no_such_module_here",)), Counters("reward")):
            pass
    assert caught.value.reason is Reason.INTERNAL
