"""The other end of a raw broadcast: joins the group in argv and receives buckets until none are left."""

from __future__ import annotations

import sys
import time

import torch

from omnifleet_refit.group import join
from omnifleet_rollout.refit.source import Seat

if __name__ == "__main__":
    device = torch.device("cuda", 0)
    seat = Seat.parse(sys.argv[1])
    group = join(
        seat.host,
        seat.port,
        seat.name,
        rank=seat.rank,
        size=seat.size,
        device=device,
        timeout_s=seat.deadline_s,
    )
    bucket = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device=device)
    deadline = time.monotonic() + 60
    with group.stream():
        for _ in range(int(sys.argv[3])):
            group.broadcast(bucket, deadline)
        group.finish(deadline)
