"""How the media commands find their service, show long work, and write sizes."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from omnifleet.auth import Tokens
    from omnifleet.client.media import MediaClient

_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?i?b?)", re.IGNORECASE)
_UNITS = "kmgt"


class Step(Protocol):
    """Told about each finished piece of long work."""

    def __call__(self, size: int = 1, /) -> None:
        """`size` more is done."""


def parse_size(text: str) -> int:
    """`20000000`, `20MB` (10^6) or `20MiB` (2^20) as bytes. Raises ValueError."""
    found = _SIZE.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is not a size such as 500000, 20MB or 1.5GiB")
    unit = found[2].lower()
    power = _UNITS.index(unit[0]) + 1 if unit[:1] and unit[0] in _UNITS else 0
    return int(float(found[1]) * (1024 if "i" in unit else 1000) ** power)


def show_size(count: float) -> str:
    """Bytes for people, in powers of 1000."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@contextmanager
def bar(what: str, total: int, *, of_bytes: bool = False) -> Iterator[Step]:
    """A progress bar on stderr for work of `total` pieces or bytes; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    console = Console(stderr=True)
    counts = [DownloadColumn(), TransferSpeedColumn()] if of_bytes else [MofNCompleteColumn()]
    columns = [TextColumn("{task.description}"), BarColumn(), *counts, TimeRemainingColumn()]
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as progress:
        task = progress.add_task(what, total=total)

        def step(size: int = 1, /) -> None:
            progress.advance(task, size)

        yield step


@contextmanager
def spinner(what: str) -> Iterator[None]:
    """Signs of life on stderr for work whose length is not known."""
    from rich.console import Console

    console = Console(stderr=True)
    if not console.is_terminal:
        yield
        return
    with console.status(what):
        yield


def say(text: str) -> None:
    """One line on stderr: about the work, not its result."""
    print(text, file=sys.stderr, flush=True)


def talk(
    run_dir: Path | None,
    address: str,
    work: Callable[[MediaClient], Awaitable[None]],
    *,
    operator: bool = False,
    deadline_s: float = 120.0,
) -> None:
    """Do `work` with a client of the service; an error is one line and status 2."""
    from omnifleet.service import run_to_exit

    async def talking() -> None:
        async with connected(run_dir, address, operator=operator, deadline_s=deadline_s) as client:
            await work(client)

    run_to_exit(talking())


@asynccontextmanager
async def connected(
    run_dir: Path | None, address: str, *, operator: bool, deadline_s: float
) -> AsyncIterator[MediaClient]:
    """A client of the run's service, or of the one at `address`. Raises OmnifleetError."""
    from omnifleet.auth import Scope
    from omnifleet.client.media import MediaClient
    from omnifleet.errors import invalid
    from omnifleet.service import peer

    if run_dir is None and not address:
        raise invalid("say where the service is: --run-dir FOLDER or --address HOST:PORT")
    secret = tokens_of(run_dir).secret(Scope.OPERATOR if operator else Scope.ENV)
    if not address:
        assert run_dir is not None
        address = await peer(run_dir, "media", deadline_s=5)
    async with MediaClient.open(address, secret, name="cli", deadline_s=deadline_s) as client:
        yield client


def tokens_of(run_dir: Path | None) -> Tokens:
    """Tokens from the file that OMNIFLEET_TOKENS names, else from the run's folder, else none."""
    from omnifleet.auth import OPEN, Tokens

    file = os.environ.get("OMNIFLEET_TOKENS") or (run_dir / "tokens.json" if run_dir else None)
    return Tokens.load(Path(file)) if file else OPEN
