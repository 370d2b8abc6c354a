"""What a process has done so far: processor seconds, and pages that had to be faulted in for it."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Mapping
from pathlib import Path

import psutil

Work = tuple[float, float]
"""(processor seconds, page faults)"""


def work_of(service: psutil.Process) -> dict[str, Work]:
    """(processor seconds, page faults) so far of the service, its decoders and this client."""
    decoders = [work(child.pid) for child in service.children()]
    return {
        "service": work(service.pid),
        "decoders": (sum(s for s, _ in decoders), sum(n for _, n in decoders)),
        "client": own_work(),
    }


def work(pid: int) -> Work:
    """(processor seconds, page faults) of a process so far."""
    stat = Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()
    return (int(stat[11]) + int(stat[12])) / os.sysconf("SC_CLK_TCK"), float(stat[7])


def own_work() -> Work:
    """The same of this process, as exact as it is kept."""
    return time.process_time(), float(resource.getrusage(resource.RUSAGE_SELF).ru_minflt)


def tell(kind: str, way: str, spent: Mapping[str, Work], count: int) -> None:
    """Print what `count` files took of whom: (processor seconds, page faults)."""
    told = (f"{who} {s / count * 1000:.2f} ({faults / count:.0f})" for who, (s, faults) in spent.items())
    print(f"CPU ms (and page faults) for each of {kind}, {way}: {', '.join(told)}", flush=True)
