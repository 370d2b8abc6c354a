"""What a decoder process cannot do, and what its failing costs the others."""

from __future__ import annotations

import asyncio
import io
import os
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import process_lives
from omnifleet_media.sandbox.pool import ProcessPool
from tests.media_files import greys, h264

PROBE, READING = "tests.unit.sandbox_probe", "tests.unit.reading_probe"


@asynccontextmanager
async def pool(
    role: str = PROBE, *, size: int = 1, work_s: float = 60.0, memory_bytes: int = 1 << 30
) -> AsyncIterator[ProcessPool]:
    made = ProcessPool(
        role, size, work_s=work_s, memory_bytes=memory_bytes, reply_bytes=1 << 30, time_knob="the knob"
    )
    try:
        yield made
    finally:
        await made.close()


async def tried(probe: ProcessPool, action: str, path: object = "") -> str:
    answer, _ = await probe.call({"try": action, "path": str(path)})
    return str(answer["outcome"])


async def filtered(probe: ProcessPool) -> None:
    """Skip where this machine offers no filter; rlimits are tested all the same."""
    reason = (await probe.warm())["unfiltered"]
    if reason:
        pytest.skip(f"no seccomp here: {reason}")


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        sock.listen()
        sock.setblocking(False)
        yield sock


async def test_sec_06_a_decoder_opens_no_connection(listener: socket.socket) -> None:
    async with pool() as probe:
        await filtered(probe)
        for action in ("connect", "thread connects"):
            assert await tried(probe, action, listener.getsockname()[1]) == "PermissionError"
    with pytest.raises(BlockingIOError):
        listener.accept()


async def test_sec_01_a_decoder_opens_no_file(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("text")
    async with pool() as probe:
        await filtered(probe)
        assert await tried(probe, "read", secret) == "PermissionError"
        assert await tried(probe, "read", tmp_path / "missing") == "PermissionError"


async def test_a_processor_reads_files_and_changes_none(tmp_path: Path) -> None:
    kept = tmp_path / "kept"
    kept.write_text("text")
    async with pool(READING) as probe:
        await filtered(probe)
        assert await tried(probe, "read", kept) == "text"
        for action in ("write", "remove"):
            assert await tried(probe, action, kept) == "PermissionError"
        assert await tried(probe, "write", tmp_path / "new") == "PermissionError"
    assert kept.read_text() == "text"
    assert not (tmp_path / "new").exists()


async def test_a_decoder_starts_threads_and_no_process() -> None:
    async with pool() as probe:
        await filtered(probe)
        assert await tried(probe, "thread") == "ran"
        for action in ("run", "fork"):
            assert await tried(probe, action) == "PermissionError"


async def test_a_decoder_signals_nobody() -> None:
    async with pool() as probe:
        await filtered(probe)
        assert await tried(probe, "signal", os.getpid()) == "PermissionError"


async def test_no_decoder_may_grow_without_end() -> None:
    async with pool(memory_bytes=64 << 20) as probe:
        with pytest.raises(OmnifleetError) as caught:
            await tried(probe, "grow")
        assert (caught.value.reason, caught.value.knob) == (
            Reason.LIMIT_EXCEEDED,
            "media.limits.decode_memory_bytes",
        )
        assert await tried(probe, "nothing") == "done"


async def test_a_crash_costs_its_own_request_only() -> None:
    async with pool(size=2) as probe:
        crash, *rest = await asyncio.gather(
            *(tried(probe, action) for action in ("crash", *["nothing"] * 8)), return_exceptions=True
        )
        assert isinstance(crash, OmnifleetError)
        assert crash.reason is Reason.INVALID_MEDIA
        assert rest == ["done"] * 8
        assert probe.replaced == 2  # it was tried twice


def png() -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (8, 8)).save(out, "PNG")
    return out.getvalue()


async def test_vid_18_a_stuck_native_decode_blocks_nobody() -> None:
    async with pool(work_s=5.0) as stuck, pool("pictures") as pictures:
        pid = (await stuck.warm())["pid"]
        await pictures.warm()
        sleeping = asyncio.create_task(tried(stuck, "sleep"))
        request: dict[str, Any] = {"codec": "PNG", "pixels": 64, "background": "ffffff"}
        answers = await asyncio.gather(*(pictures.call(request, png()) for _ in range(20)))
        assert [answer["shape"] for answer, _ in answers] == [[8, 8, 3]] * 20
        assert not sleeping.done()
        with pytest.raises(OmnifleetError) as caught:
            await sleeping
        assert (caught.value.reason, caught.value.knob) == (Reason.LIMIT_EXCEEDED, "the knob")
        assert not process_lives(pid)
        assert await tried(stuck, "nothing") == "done"
        assert stuck.replaced == 1


def resident(pid: int) -> int:
    """Bytes of a process in memory that are its own; pages of files come and go with what else the machine does."""
    status = dict(line.split(":") for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(status["RssAnon"].split()[0]) << 10


def open_files(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


ASKED = {
    "sampling": "uniform@1",
    "num_frames": 0,
    "fps": 0.0,
    "temporal_patch": 1,
    "indices": [],
    "threads": 2,
    "pixels": 1 << 20,
    "frames": 64,
    "seconds": 60.0,
    "bytes": 1 << 24,
}


async def leaks_nothing(clips: ProcessPool, warm_up: int, total: int) -> None:
    """Memory and descriptors of a decoder, and of this process, after many clips of eight callers."""
    data = h264(greys(24))
    pid = (await clips.warm())["pid"]

    async def decode(count: int) -> None:
        for _ in range(count):
            answer, _ = await clips.call(ASKED, data)
            assert answer["frames"] == 24

    await asyncio.gather(*(decode(warm_up // 8) for _ in range(8)))
    before = [(resident(p), open_files(p)) for p in (pid, os.getpid())]
    await asyncio.gather(*(decode((total - warm_up) // 8) for _ in range(8)))
    after = [(resident(p), open_files(p)) for p in (pid, os.getpid())]
    assert clips.replaced == 0
    assert [fds for _, fds in after] == [fds for _, fds in before]
    grown = [b[0] - a[0] for a, b in zip(before, after, strict=True)]
    assert max(grown) < 30 << 20, grown


async def damage_costs_no_process(clips: ProcessPool) -> None:
    """Damaged clips end their own request, in words."""
    whole, rng, outcomes = h264(greys(24)), np.random.default_rng(0), set()
    for _ in range(40):
        broken = np.frombuffer(whole, np.uint8).copy()
        broken[rng.integers(0, len(broken), 24)] = rng.integers(0, 256, 24)
        try:
            answer, _ = await clips.call({**ASKED, "num_frames": 4}, broken.tobytes())
            outcomes.add(answer["frames"] <= 4)
        except OmnifleetError as error:
            outcomes.add(error.reason)
    assert clips.replaced == 0
    assert outcomes <= {True, Reason.INVALID_MEDIA, Reason.LIMIT_EXCEEDED}
    assert Reason.INVALID_MEDIA in outcomes


async def test_vid_17_clips_leak_nothing_and_damage_costs_no_process() -> None:
    async with pool("clips") as clips:
        await damage_costs_no_process(clips)
        await leaks_nothing(clips, 80, 240)


@pytest.mark.soak
async def test_vid_17_two_thousand_clips_leak_nothing() -> None:
    async with pool("clips") as clips:
        await leaks_nothing(clips, 200, 2_000)
