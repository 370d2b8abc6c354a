"""Orders to stage on a socket: answers and refusals cross as they are, and a process that ends is found out."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Sequence

import pytest
import uvloop

from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet_rollout.refit.background import Background, short_turns
from omnifleet_rollout.refit.door import Door, Tell, ask_for_tensors, knock, knock_all


def no_export(path: str, tensors: Sequence[tuple[str, str]]) -> int:
    raise OmnifleetError(Reason.UNSUPPORTED, f"no {path}")


def test_an_order_is_given_from_either_event_loop() -> None:
    door = Door(lambda manifest, source, tell, in_place: tell(len(manifest)), no_export)
    for factory in (asyncio.new_event_loop, uvloop.new_event_loop):
        with asyncio.Runner(loop_factory=factory) as runner:
            assert runner.run(knock(door.name, "x" * (1 << 20), "path")) == 1 << 20
    door.close()


async def test_an_order_for_tensors_is_answered_too() -> None:
    def export(path: str, tensors: Sequence[tuple[str, str]]) -> int:
        assert tensors == [("a", "F32")]
        return len(path)

    door = Door(lambda manifest, source, tell, in_place: None, export)
    assert await ask_for_tensors(door.name, "path", [("a", "F32")]) == 4
    door.close()
    door = Door(lambda manifest, source, tell, in_place: None, no_export)
    with pytest.raises(OmnifleetError, match="no path"):
        await ask_for_tensors(door.name, "path", [("a", "F32")])
    door.close()


async def test_bytes_and_refusals_cross_as_they_are() -> None:
    def begin(manifest: str, source: str, tell: Tell, in_place: bool) -> None:
        if source == "refuse":
            raise OmnifleetError(Reason.REFIT_REJECTED, "no", knob="k")
        if source == "fail later":
            threading.Thread(target=tell, args=(retryable(Reason.DEADLINE, "late"),)).start()
            return
        threading.Thread(target=tell, args=(len(manifest),)).start()

    door = Door(begin, no_export)
    assert await knock(door.name, "x" * (3 << 20), "path") == 3 << 20
    with pytest.raises(OmnifleetError) as refused:
        await knock(door.name, "{}", "refuse")
    assert refused.value.reason is Reason.REFIT_REJECTED and refused.value.knob == "k"
    with pytest.raises(OmnifleetError) as late:
        await knock(door.name, "{}", "fail later")
    assert late.value.reason is Reason.DEADLINE and late.value.retryable
    door.close()


async def test_two_orders_are_answered_each_by_itself() -> None:
    tells: dict[str, Tell] = {}
    door = Door(lambda manifest, source, tell, in_place: tells.__setitem__(source, tell), no_export)
    one = asyncio.create_task(knock(door.name, "{}", "one"))
    two = asyncio.create_task(knock(door.name, "{}", "two"))
    async with asyncio.timeout(10):
        while len(tells) < 2:  # noqa: ASYNC110  the door's threads tell no event
            await asyncio.sleep(0.005)
    tells["two"](2)
    assert await two == 2
    tells["one"](1)
    assert await one == 1
    door.close()


async def test_all_ranks_have_ended_before_a_refusal_is_told_but_where_they_wait_for_one_another() -> None:
    tells: list[Tell] = []
    knocked = threading.Event()

    def begin(manifest: str, source: str, tell: Tell, in_place: bool) -> None:
        tells.append(tell)
        knocked.set()

    def refuse(manifest: str, source: str, tell: Tell, in_place: bool) -> None:
        raise OmnifleetError(Reason.REFIT_REJECTED, "no")

    doors = [Door(begin, no_export), Door(refuse, no_export)]
    names = [door.name for door in doors]
    with pytest.raises(OmnifleetError, match="no"):
        await knock_all(names, "{}", "group://h:1/n?rank=1&size=3&deadline_s=1")
    await asyncio.to_thread(knocked.wait, 10)
    tells.pop()(1)
    knocked.clear()
    lent = asyncio.create_task(knock_all(names, "{}", "cuda-ipc:[]"))
    await asyncio.to_thread(knocked.wait, 10)
    with pytest.raises(OmnifleetError, match="no"):  # a whole order later, it is still waiting
        await knock(names[1], "{}", "cuda-ipc:[]")
    assert not lent.done()
    tells.pop()(1)
    with pytest.raises(OmnifleetError, match="no"):
        await lent
    for door in doors:
        door.close()


async def test_a_door_that_is_not_there_is_a_lost_worker() -> None:
    with pytest.raises(OmnifleetError) as lost:
        await knock("omnifleet-stage-nobody", "{}", "path")
    assert lost.value.reason is Reason.WORKER_LOST and lost.value.retryable


async def test_the_thread_that_stages_answers_itself_in_short_turns() -> None:
    usual = sys.getswitchinterval()
    turns: list[float] = []

    def begin(manifest: str, source: str, tell: Tell, in_place: bool) -> None:
        def done(result: int | Exception) -> None:
            tell(7)
            turns.append(sys.getswitchinterval())

        Background(lambda: 7, lambda: None, done).result()

    door = Door(begin, no_export)
    assert await knock(door.name, "{}", "path") == 7
    door.close()
    for thread in threading.enumerate():
        if thread.name == "refit stage":
            thread.join(5)
    assert turns and turns[0] < usual
    assert sys.getswitchinterval() == usual


def test_turns_are_the_usual_ones_again_when_the_last_has_left() -> None:
    usual, first = sys.getswitchinterval(), short_turns()
    with short_turns():
        first.__enter__()
        assert sys.getswitchinterval() < usual
    assert sys.getswitchinterval() < usual, "the other is still inside"
    first.__exit__(None, None, None)
    assert sys.getswitchinterval() == pytest.approx(usual)
