"""A stop by a scheduler ends like one by Ctrl-C: what an event loop has open is closed first."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator

import pytest

from omnifleet.cli.run import take_sigterm_for_ctrl_c


@pytest.fixture(
    autouse=True, params=[signal.default_int_handler, signal.SIG_IGN], ids=["shell", "background"]
)
def handlers(request: pytest.FixtureRequest) -> Iterator[None]:
    """As a process begins: in a shell's foreground, and behind `&` or nohup, where Ctrl-C is ignored."""
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGINT, request.param)
    take_sigterm_for_ctrl_c()
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_sigterm_in_an_event_loop_lets_it_close_what_it_has_open() -> None:
    told: list[str] = []

    async def work() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0)
            told.append("closed")

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(work())
    assert told == ["closed"]


def test_sigterm_elsewhere_is_an_interrupt() -> None:
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGTERM)
        signal.sigtimedwait([], 5)
