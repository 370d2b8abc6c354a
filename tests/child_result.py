"""What a script in a process of its own found out: the JSON after RESULT on one line of its output."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

LIMIT_S = 280


def result_of(script: str, *arguments: str) -> dict[str, Any]:
    """Run a Python script to its end, at most LIMIT_S; its result. Fails with the end of its errors if it failed."""
    done = subprocess.run(
        [sys.executable, "-c", script, *arguments],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
        env=dict(os.environ),
    )
    assert done.returncode == 0, done.stderr[-4000:]
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    result: dict[str, Any] = json.loads(line.removeprefix("RESULT "))
    return result
