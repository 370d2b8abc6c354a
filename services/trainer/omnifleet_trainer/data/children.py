"""A service of our own, started for one command: what it says here is what it says in a run."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from omnifleet.auth import Scope
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import load_tokens, peer

_START_S = 120.0
_STOP_S = 10.0


@asynccontextmanager
async def service(name: str, settings: Sequence[str]) -> AsyncIterator[tuple[str, str]]:
    """gRPC address and a secret of `omnifleet NAME serve` in a scratch folder; stopped on exit.

    settings: section.field=value. Raises UNAVAILABLE with its last words if it does not come up.
    """
    with tempfile.TemporaryDirectory(prefix=f"omnifleet-{name}-") as scratch:
        run_dir = Path(scratch)
        secret = load_tokens(run_dir).secret(Scope.TRAINER)
        command = [sys.executable, "-m", "omnifleet", name, "serve", "--run-dir", scratch]
        for setting in settings:
            command += ["--set", setting]
        with (run_dir / "log").open("wb") as log:
            child = await asyncio.create_subprocess_exec(
                *command, stdout=log, stderr=log, start_new_session=True
            )
        try:
            yield await _address(child, run_dir, name), secret
        finally:
            with suppress(ProcessLookupError):
                child.terminate()
            with suppress(TimeoutError):
                await asyncio.wait_for(child.wait(), _STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(child.pid, signal.SIGKILL)
            await child.wait()


async def _address(child: asyncio.subprocess.Process, run_dir: Path, name: str) -> str:
    coming = asyncio.create_task(peer(run_dir, name, deadline_s=_START_S))
    ended = asyncio.create_task(child.wait())
    try:
        await asyncio.wait({coming, ended}, return_when=asyncio.FIRST_COMPLETED)
        if coming.done():
            return coming.result()
        said = (run_dir / "log").read_text(errors="replace").strip().splitlines()[-1:]
        raise OmnifleetError(Reason.UNAVAILABLE, f"{name} did not start: {' '.join(said)}")
    finally:
        coming.cancel()
        ended.cancel()
