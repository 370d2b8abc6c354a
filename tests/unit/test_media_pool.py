"""Decoder processes: limits, replacement, and no process left behind."""

from __future__ import annotations

import asyncio
import io
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import numpy as np
import pytest
from PIL import Image

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import process_lives
from omnifleet_media.sandbox.arena import ARENA_BYTES, make_arena
from omnifleet_media.sandbox.pool import ProcessPool


@asynccontextmanager
async def pictures(
    *, size: int = 1, work_s: float = 20.0, memory_bytes: int = 1 << 30
) -> AsyncIterator[ProcessPool]:
    pool = ProcessPool(
        "pictures",
        size,
        work_s=work_s,
        memory_bytes=memory_bytes,
        reply_bytes=1 << 30,
        time_knob="media.limits.decode_seconds",
    )
    try:
        yield pool
    finally:
        await pool.close()


def request(side: int = 8, limit: int = 1 << 30) -> tuple[dict[str, object], bytes]:
    out = io.BytesIO()
    Image.fromarray(np.zeros((side, side, 3), np.uint8)).save(out, "PNG")
    return {"codec": "PNG", "pixels": limit, "background": "ffffff"}, out.getvalue()


async def test_a_picture_comes_back() -> None:
    async with pictures() as pool:
        answer, body = await pool.call(*request(8))
        assert answer == {"shape": [8, 8, 3]}
        assert len(body) == 192


async def test_bodies_too_large_for_the_arena_come_back_too() -> None:
    async with pictures() as pool:
        for side in (4800, 8):
            answer, body = await pool.call(*request(side))
            assert answer == {"shape": [side, side, 3]}
            assert len(body) == 3 * side * side
    assert ARENA_BYTES < 3 * 4800 * 4800


async def test_an_answer_is_out_of_reach_of_the_process_that_gave_it() -> None:
    async with pictures() as pool:
        _, first = await pool.call(*request(8))
        out = io.BytesIO()
        Image.new("RGB", (8, 8), "white").save(out, "PNG")
        await pool.call(request(8)[0], out.getvalue())
        assert not any(first)


def test_neither_side_can_shrink_the_arena_under_the_other() -> None:
    fd = make_arena()
    try:
        for size in (0, 4 * ARENA_BYTES):
            with pytest.raises(PermissionError):
                os.ftruncate(fd, size)
    finally:
        os.close(fd)


async def test_damage_ends_a_request_not_the_process() -> None:
    async with pictures() as pool:
        header, data = request(64)
        with pytest.raises(OmnifleetError) as caught:
            await pool.call(header, data[:60])
        assert caught.value.reason is Reason.INVALID_MEDIA
        await pool.call(header, data)
        assert pool.replaced == 0


async def test_a_stuck_process_is_replaced() -> None:
    async with pictures(work_s=0.02) as pool:
        await pool.warm()
        with pytest.raises(OmnifleetError) as caught:
            await pool.call(*request(6000))
        assert (caught.value.reason, caught.value.knob) == (
            Reason.LIMIT_EXCEEDED,
            "media.limits.decode_seconds",
        )
        assert pool.replaced == 1


async def test_memory_is_limited() -> None:
    async with pictures(memory_bytes=32 << 20) as pool:
        with pytest.raises(OmnifleetError) as caught:
            await pool.call(*request(6000))
        assert (caught.value.reason, caught.value.knob) == (
            Reason.LIMIT_EXCEEDED,
            "media.limits.decode_memory_bytes",
        )
        await pool.call(*request(8))


async def test_a_killed_process_is_replaced_and_the_request_is_tried_again() -> None:
    async with pictures() as pool:
        pid = (await pool.warm())["pid"]
        os.kill(pid, signal.SIGKILL)
        await pool.call(*request())
        assert pool.replaced == 1


async def test_a_cancelled_request_costs_its_process_only() -> None:
    async with pictures() as pool:
        first = (await pool.warm())["pid"]
        task = asyncio.create_task(pool.call(*request(6000)))
        while not pool.busy:  # noqa: ASYNC110 -- one turn of the loop, not a wait
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert not process_lives(first)
        await pool.call(*request())


async def test_a_cancelled_request_that_waits_costs_no_process() -> None:
    async with pictures() as pool:
        tasks = [asyncio.create_task(pool.call(*request(1000 + i))) for i in range(6)]
        while not pool.busy:  # noqa: ASYNC110 -- the process has to start
            await asyncio.sleep(0.001)
        tasks[-1].cancel()
        answers = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(answers.pop(), asyncio.CancelledError)
        assert [answer[0]["shape"][0] for answer in answers] == list(range(1000, 1005))  # type: ignore[index]
        assert pool.replaced == 0


async def test_answers_to_requests_that_are_sent_ahead_do_not_mix() -> None:
    def shade(value: int) -> bytes:
        out = io.BytesIO()
        Image.new("L", (16 + value, 9), value).save(out, "PNG")
        return out.getvalue()

    async with pictures(size=2) as pool:
        header = request()[0]
        answers = await asyncio.gather(*(pool.call(header, shade(value)) for value in range(100)))
    for value, (answer, body) in enumerate(answers):
        assert answer["shape"] == [9, 16 + value, 3]
        assert set(bytes(body)) == {value}


async def test_what_is_made_of_an_answer_fails_its_request_alone() -> None:
    def spoilt(header: object, body: memoryview) -> int:
        if len(body) == 12:
            raise OSError("no room")
        return len(body)

    async with pictures() as pool:
        made = await asyncio.gather(
            *(pool.call(*request(side), spoilt) for side in (1, 2, 3)), return_exceptions=True
        )
        assert [made[0], made[2]] == [3, 27]
        assert isinstance(made[1], OSError)
        assert pool.replaced == 0


async def test_closing_leaves_no_process() -> None:
    async with pictures(size=2) as pool:
        pids = [(await pool.warm())["pid"]]
        await asyncio.gather(*(pool.call(*request()) for _ in range(4)))
    assert not any(process_lives(pid) for pid in pids)
