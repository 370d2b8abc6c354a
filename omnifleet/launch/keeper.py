"""Keeps one process alive exactly as long as whoever holds the other end of stdin: `python -m omnifleet.launch.keeper`.

A Ray worker process may be killed at any moment, and its children with it or not. The keeper leaves its process tree,
starts the command, and ends it, with all that it started, when stdin says so or closes.

stdin, a JSON object a line: {"name", "command", "env", "log"}, then at most one {"stop": grace seconds}.
stdout, likewise: {"pid": n} or {"error": text}, then {"exit": status}.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import sys
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError
from omnifleet.launch.local import LocalHandle, LocalLauncher
from omnifleet.launch.port import ProcessSpec

GRACE_S = 10.0
"""Between SIGTERM and SIGKILL when stdin closed without a word."""
_POLL_S = 0.1


def main() -> None:
    """Leave the caller's process tree, then keep the process that stdin names."""
    if os.fork():
        os._exit(0)
    request = json.loads(_line())
    try:
        handle = LocalLauncher().start(
            ProcessSpec(request["name"], request["command"], request["env"], Path(request["log"]))
        )
    except (OmnifleetError, OSError) as error:
        _say(error=str(error))
        return
    _say(pid=handle.pid)
    _say(exit=_keep(handle))


def _keep(handle: LocalHandle) -> int:
    while (code := handle.poll()) is None:
        if select.select([0], [], [], _POLL_S)[0]:
            line = _line()
            handle.stop(float(json.loads(line)["stop"]) if line else GRACE_S)
    return code


def _line() -> bytes:
    """The next line of stdin, b"" at its end. Unbuffered: `select` sees what is left."""
    line = bytearray()
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            break
        line += byte
    return bytes(line)


def _say(**words: Any) -> None:
    with contextlib.suppress(BrokenPipeError):  # nobody listens any more
        sys.stdout.write(json.dumps(words) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
