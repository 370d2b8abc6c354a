"""Which GPUs' memory a process may map: its own, those that CUDA says it reaches, and those that it can't ask about."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from omnifleet_refit.lent import gpu_of, may_reach


def test_a_gpu_that_is_seen_is_asked_and_one_that_is_not_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = (torch.device("cuda", number) for number in range(2))
    reached = {(one, two)}
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"GPU-{device.index}")
    )
    monkeypatch.setattr(torch.cuda, "can_device_access_peer", lambda a, b: (a, b) in reached)
    assert gpu_of(two) == "GPU-1"
    assert may_reach(one, "GPU-0") and may_reach(one, "GPU-1")
    assert not may_reach(two, "GPU-0")
    assert may_reach(two, "GPU-of-others")
