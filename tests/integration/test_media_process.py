"""The media service as a real process: kills, restarts, clean stops, the command line."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.service import load_tokens, peer, process_lives, read_records
from omnifleet.types import MediaRef
from tests.contract.media_world import pixels_of, png

COMMAND = (sys.executable, "-m", "omnifleet_media")


@asynccontextmanager
async def service(run_dir: Path, *options: str) -> AsyncIterator[asyncio.subprocess.Process]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND,
        "serve",
        "--run-dir",
        str(run_dir),
        "--set",
        f"media.shared_memory={run_dir / 'shm'}",
        "--set",
        "media.processors=[]",
        *options,
        stderr=asyncio.subprocess.PIPE,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


@asynccontextmanager
async def client_of(run_dir: Path, address: str = "") -> AsyncIterator[MediaClient]:
    secret = load_tokens(run_dir).secret(Scope.OPERATOR)
    address = address or await peer(run_dir, "media", deadline_s=30)
    async with MediaClient.open(address, secret, deadline_s=30) as client:
        yield client


async def run(*arguments: str) -> tuple[int, str]:
    process = await asyncio.create_subprocess_exec(
        *COMMAND, *arguments, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    output, _ = await process.communicate()
    return process.returncode or 0, output.decode()


def children_of(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


class Uploads:
    """Uploads without end; remembers what was acknowledged and tells when a round has had its share."""

    def __init__(self) -> None:
        self.acknowledged: dict[int, MediaRef] = {}
        self.enough = asyncio.Event()
        self._goal = 0

    def ask_for(self, more: int) -> None:
        self.enough.clear()
        self._goal = len(self.acknowledged) + more

    async def go(self, client: MediaClient, seeds: range) -> None:
        for seed in seeds:
            self.acknowledged[seed] = await client.put_image(png(seed), "run")
            if len(self.acknowledged) >= self._goal:
                self.enough.set()


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=[pytest.mark.soak, pytest.mark.timeout(1500)])])
async def test_a_kill_loses_nothing_that_was_acknowledged(tmp_path: Path, kills: int) -> None:
    uploads = Uploads()
    children: list[int] = []
    for first in range(0, 4000 * kills, 4000):
        async with service(tmp_path) as process, client_of(tmp_path) as client:
            uploads.ask_for(40)
            tasks = [
                asyncio.create_task(uploads.go(client, range(first + k, first + 4000, 4))) for k in range(4)
            ]
            async with asyncio.timeout(60):
                await uploads.enough.wait()
            children += children_of(process.pid)
            process.kill()
            await process.wait()
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    async with service(tmp_path), client_of(tmp_path) as client:
        assert len(uploads.acknowledged) >= 40 * kills
        for seed, ref in uploads.acknowledged.items():
            assert (await client.frame(ref) == pixels_of(png(seed))).all()
        assert (await client.verify()).corrupt == ()
        assert len(list((tmp_path / "shm").iterdir())) == 1  # the folders of the killed are gone
        await client.collect(1 << 40)
        assert (await client.collect(1 << 40, dry_run=True)).orphans == 0
    assert children
    assert not any(process_lives(pid) for pid in children)


async def test_a_client_lives_through_a_restart(tmp_path: Path) -> None:
    async with service(tmp_path) as process:
        address = await peer(tmp_path, "media", deadline_s=30)
        async with client_of(tmp_path, address) as client:
            ref = await client.put_image(png(), "run", durable=True)
            process.kill()
            await process.wait()
            asking = asyncio.create_task(client.frame(ref))
            async with service(tmp_path, "--listen", address):
                assert (await asking == pixels_of(png())).all()


async def test_a_stop_is_clean(tmp_path: Path) -> None:
    async with service(tmp_path) as process:
        async with client_of(tmp_path) as client:
            await client.put_image(png(), "run")
        children = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        async with asyncio.timeout(10):
            await process.wait()
        assert process.returncode == 0
    assert children
    assert not any(process_lives(pid) for pid in children)
    assert not list((tmp_path / "shm").iterdir())


async def test_the_decoder_can_be_killed(tmp_path: Path) -> None:
    async with service(tmp_path) as process, client_of(tmp_path) as client:
        await client.put_image(png(0), "run")
        for pid in children_of(process.pid):
            os.kill(pid, signal.SIGKILL)
        assert (await client.frame(await client.put_image(png(1), "run")) == pixels_of(png(1))).all()


async def test_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(png(3, (40, 30)))
    where = ("--run-dir", str(tmp_path))
    async with service(tmp_path):
        await peer(tmp_path, "media", deadline_s=60)
        code, text = await run("put", str(tmp_path / "a.png"), "--durable", *where)
        assert code == 0, text
        digest = text.split()[0]
        assert re.fullmatch(r"[0-9a-f]{64}  40x30  \S+a\.png\n", text)
        code, text = await run("get", f"media://{digest}", "-o", str(tmp_path / "b.png"), *where)
        assert code == 0, text
        assert (np.asarray(Image.open(tmp_path / "b.png")) == pixels_of(png(3, (40, 30)))).all()
        code, text = await run("stat", digest, *where)
        assert (code, "40x30" in text, "shared_memory" in text) == (0, True, True), text
        code, text = await run("verify", *where)
        assert (code, text) == (0, "checked 3 blobs, 0 corrupt\n")
        code, text = await run("gc", "--target-bytes", "1MB", "--dry-run", *where)
        assert (code, text) == (0, "would free 0 bytes (0 B): 0 entries, 0 orphans\n")
        code, text = await run("gc", "--target-bytes", "0", *where)
        assert (code, text.startswith("freed ")) == (0, True), text
        code, text = await run("stat", digest, *where)
        assert (code, "not_found" in text, "Traceback" in text) == (2, True, False), text


async def test_a_folder_is_put_and_read_back(tmp_path: Path) -> None:
    folder = tmp_path / "pictures"
    (folder / "deep").mkdir(parents=True)
    for seed in range(6):
        (folder / "deep" / f"{seed}.png").write_bytes(png(seed % 3, (40, 30)))
    (folder / "notes.txt").write_text("no picture")
    (folder / ".hidden.png").write_bytes(png(9))
    where = ("--run-dir", str(tmp_path))
    async with service(tmp_path):
        await peer(tmp_path, "media", deadline_s=60)
        code, text = await run("put", str(folder), "--json", "--lease", "me", "-j", "2", *where)
        assert code == 1, text
        lines = text.splitlines()
        stored = [json.loads(line) for line in lines if line.startswith("{")]
        assert {Path(one["name"]).name for one in stored} == {f"{seed}.png" for seed in range(6)}
        assert sum(one["new"] for one in stored) == len({one["digest"] for one in stored}) == 3
        assert all(one["lease"] for one in stored)
        assert [line for line in lines if "notes.txt: invalid_media" in line]
        assert lines[-1].startswith("6 stored (3 new), 1 refused")
        code, text = await run("get", stored[0]["digest"], "--all", "-o", str(tmp_path / "out"), *where)
        assert (code, [path.name for path in (tmp_path / "out").iterdir()]) == (0, ["00000.png"]), text
        code, text = await run(
            "get", stored[0]["source_digest"], "--source", "-o", str(tmp_path / "s"), *where
        )
        seed = int(re.sub(r".*(\d)\.png", r"\1", stored[0]["name"]))
        assert (code, (tmp_path / "s").read_bytes()) == (0, png(seed % 3, (40, 30))), text
        code, text = await run("stat", *where)
        assert code == 0, text
        assert re.search(r"^dedup ratio +2\.00 ", text, re.MULTILINE), text
        assert re.search(r"^alias hit rate +50\.0%", text, re.MULTILINE), text
        assert re.search(
            r"^media_put +6 +21\.6 kB +10\.8 kB +10\.8 kB +[\d.]+ kB +0\.500$", text, re.MULTILINE
        ), text
        code, text = await run("stat", "--json", *where)
        assert json.loads(text)["counters"]["payload_counts/media_put/calls"] == 6


async def test_the_browse_link_opens_the_page_once(tmp_path: Path) -> None:
    async with service(tmp_path), httpx.AsyncClient(follow_redirects=True, timeout=60) as browser:
        await peer(tmp_path, "media", deadline_s=60)
        code, text = await run("browse", "--run-dir", str(tmp_path))
        assert code == 0, text
        assert load_tokens(tmp_path).secret(Scope.ENV) not in text
        page = await browser.get(text.strip())
        assert (page.status_code, "Nothing is stored yet" in page.text) == (200, True)
        browser.cookies.clear()
        assert (await browser.get(text.strip())).status_code == 401


async def test_mistakes_are_told_in_one_line(tmp_path: Path) -> None:
    for arguments, words in (
        (("put", "a.png"), "--run-dir FOLDER"),
        (
            ("put", str(tmp_path / "absent.png"), "--address", "127.0.0.1:1", "--timeout", "0.2"),
            "unavailable",
        ),
        (("stat", "--run-dir", str(tmp_path / "nowhere")), "invalid_config"),
    ):
        code, text = await run(*arguments)
        assert (code, words in text, text.count("\n"), "Traceback" in text) == (2, True, 1, False), text


async def test_a_taken_port_and_a_bad_setting_are_one_line(tmp_path: Path) -> None:
    async with service(tmp_path / "one"):
        address = await peer(tmp_path / "one", "media", deadline_s=30)
        code, text = await run("serve", "--run-dir", str(tmp_path / "two"), "--listen", address)
        assert (code, "port_taken" in text, "media.listen" in text) == (2, True, True), text
        assert "Traceback" not in text
    code, text = await run("serve", "--run-dir", str(tmp_path / "two"), "--set", "media.disk_bites=1")
    assert (code, "did you mean 'disk_bytes'" in text, text.count("\n")) == (2, True, 1), text


async def test_the_record_says_where_the_service_is(tmp_path: Path) -> None:
    async with service(tmp_path) as process:
        await peer(tmp_path, "media", deadline_s=30)
        record = read_records(tmp_path)["media"]
        assert record.pid == process.pid
        async with client_of(tmp_path, record.grpc) as client:
            assert (await client.status()).state == "serving"
