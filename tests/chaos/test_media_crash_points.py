"""kill -9 of the media service at every step of storing: what was acknowledged is whole, the rest is collected."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from omnifleet_media.address.contract import clip, still
from omnifleet_media.index.port import Kind
from omnifleet_media.server.library import Library
from tests.chaos.media_light import FRAME_BYTES, everything_is_whole, light_library, source_of

_CHILD = Path(__file__).with_name("media_crash_child.py")
_WHOLE_LIFE = 10**9


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=[pytest.mark.soak, pytest.mark.timeout(900)])])
def test_a_kill_at_any_step_loses_nothing_that_was_acknowledged(tmp_path: Path, stride: int) -> None:
    with subprocess.Popen(
        [sys.executable, str(_CHILD), str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert _life(child, _WHOLE_LIFE) == 0
        steps = int((tmp_path / str(_WHOLE_LIFE) / "said").read_text().split()[-1])
        assert steps > 60
        deaths = range(steps, 0, -stride)
        for step in deaths:
            assert _life(child, step) == -signal.SIGKILL, step
        assert child.stdin is not None
        child.stdin.close()
    acknowledged = sum(asyncio.run(_check(tmp_path / str(step))) for step in deaths)
    assert acknowledged > len(deaths) // 2  # many lives got somewhere


def _life(child: subprocess.Popen[str], last: int) -> int:
    assert child.stdin is not None and child.stdout is not None
    child.stdin.write(f"{last}\n")
    child.stdin.flush()
    return int(child.stdout.readline().split()[1])


async def _check(folder: Path) -> int:
    lines = [line.split() for line in _said(folder)]
    async with light_library(folder) as library:
        for digest, *seeds in lines:
            assert await _pixels(library, digest) == source_of(*map(int, seeds)).data
        await everything_is_whole(library)
        for seeds in ((1,), (2,), (1, 2, 1, 3)):  # and the same puts go through after the crash
            contract = still() if len(seeds) == 1 else clip("uniform@1", 0, 0.0, 1)
            stored = await library.put(source_of(*seeds), contract, durable=False)
            assert await _pixels(library, stored.item.digest) == source_of(*seeds).data
    return len(lines)


def _said(folder: Path) -> list[str]:
    return (folder / "said").read_text().splitlines()


async def _pixels(library: Library, digest: str) -> bytes:
    item = await library.read(digest)
    frames = [await library.open(Kind.FRAME, frame) for frame in item.frames]
    assert all(len(frame) == FRAME_BYTES for frame in frames)
    return b"".join(frames)
