"""Dies at the N-th step of storing a few things: a server that forks one short life a line of its input.

A step is a call that changes the file system, or a commit of the index; a write is cut in half.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from omnifleet_media.address.contract import clip, still
from omnifleet_media.index.sqlite import SqliteIndex
from tests.chaos.media_light import light_library, source_of

_CALLS = ("mkdir", "open", "write", "fchmod", "link", "unlink", "fsync")


class Steps:
    """Counts steps once armed, and kills this process at the last one."""

    def __init__(self, last: int) -> None:
        self.count, self.armed, self._last = 0, False, last
        for name in _CALLS:
            setattr(os, name, self._counted(name, getattr(os, name)))
        transact = SqliteIndex._transact

        def counted(index: SqliteIndex, step: Any, begin: str) -> Any:
            def commit_after(db: Any) -> Any:
                answer = step(db)
                self.step()
                return answer

            return transact(index, commit_after, begin)

        SqliteIndex._transact = counted  # type: ignore[method-assign]

    def step(self) -> bool:
        """True if this is the last one."""
        self.count += self.armed
        if self.armed and self.count == self._last:
            os.kill(os.getpid(), signal.SIGKILL)
        return False

    def _counted(self, name: str, real: Any) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            if name == "write" and self.armed and self.count + 1 == self._last:
                real(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
            self.step()
            return real(*arguments, **named)

        return call


async def live(folder: Path, last: int) -> None:
    """Two pictures, a clip that shares their frames, one of them durable; each is said when it is acknowledged."""
    steps = Steps(last)
    with (folder / "said").open("w", buffering=1) as said:
        async with light_library(folder) as library:
            steps.armed = True
            for seeds, durable in (((1,), False), ((2,), True), ((1, 2, 1, 3), False), ((1,), False)):
                contract = still() if len(seeds) == 1 else clip("uniform@1", 0, 0.0, 1)
                stored = await library.put(source_of(*seeds), contract, durable=durable)
                said.write(f"{stored.item.digest} {' '.join(map(str, seeds))}\n")
            steps.armed = False
            said.write(f"steps {steps.count}\n")


def main(base: Path) -> None:
    for line in sys.stdin:
        last = int(line)
        folder = base / str(last)
        folder.mkdir()
        pid = os.fork()
        if pid == 0:
            asyncio.run(live(folder, last))
            os._exit(0)
        print(last, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
