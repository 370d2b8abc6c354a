"""What the devices do without any of us: copies, broadcasts, and checksums alone."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from child import DEVICE, HERE

from omnifleet_refit.fold import fold
from omnifleet_refit.group import Meeting

RAW_BYTES, RAW_TIMES = 256 << 20, 40


def raw_rate(meeting: Meeting) -> float:
    """GB/s of RAW_TIMES broadcasts of one bucket each, no checks, no engine."""
    name = meeting.new_name()
    seat = f"group://{meeting.host}:{meeting.port}/{name}?rank=1&size=2&deadline_s=60"
    env = dict(os.environ, CUDA_VISIBLE_DEVICES="1")
    arguments = [sys.executable, str(HERE / "raw.py"), seat, str(RAW_BYTES), str(RAW_TIMES + 3)]
    with subprocess.Popen(arguments, env=env) as other:
        group = meeting.open_group(name, 2, DEVICE, 60)
        bucket = torch.empty(RAW_BYTES, dtype=torch.uint8, device=DEVICE)
        deadline = time.monotonic() + 60
        with group.stream():
            for _ in range(3):
                group.broadcast(bucket, deadline)
            group.finish(deadline)
            began = time.monotonic()
            for _ in range(RAW_TIMES):
                group.broadcast(bucket, deadline)
            group.finish(deadline)
        seconds = time.monotonic() - began
        other.wait(60)
    group.abort()
    return RAW_BYTES * RAW_TIMES / seconds / 1e9


def copy_rate(to: torch.device) -> float:
    """GB/s of a copy of one bucket to a device: our own, or one beside it."""
    source = torch.randint(0, 256, (RAW_BYTES,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source, device=to)
    target.copy_(source)
    torch.cuda.synchronize(to)
    began = time.monotonic()
    for _ in range(RAW_TIMES):
        target.copy_(source)
    torch.cuda.synchronize(DEVICE)
    torch.cuda.synchronize(to)
    return RAW_BYTES * RAW_TIMES / (time.monotonic() - began) / 1e9


def fold_rate() -> float:
    """GB/s of the device checksum of one bucket with 16 tensors."""
    bucket = torch.randint(0, 256, (RAW_BYTES,), dtype=torch.uint8, device=DEVICE)
    starts = [i * (RAW_BYTES // 16) for i in range(16)]
    fold(bucket, starts)
    torch.cuda.synchronize(DEVICE)
    began = time.monotonic()
    for _ in range(RAW_TIMES):
        fold(bucket, starts)
    torch.cuda.synchronize(DEVICE)
    return RAW_BYTES * RAW_TIMES / (time.monotonic() - began) / 1e9
