"""The other end of a raw broadcast: joins the group in argv and receives buckets until none are left."""

from __future__ import annotations

import sys
import time

import torch

from omnifleet_rollout.refit.group import Seat, join

if __name__ == "__main__":
    device = torch.device("cuda", 0)
    group = join(Seat.parse(sys.argv[1]), 0, device)
    bucket = torch.empty(int(sys.argv[2]), dtype=torch.uint8, device=device)
    deadline = time.monotonic() + 60
    with group.stream():
        for _ in range(int(sys.argv[3])):
            group.broadcast(bucket, deadline)
        group.finish(deadline)
