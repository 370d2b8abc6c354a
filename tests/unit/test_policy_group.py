"""A process group after another in one process."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DeviceMesh, DTensor, Shard

from omnifleet_trainer.policy.group import ALONE, start_group


def a_world() -> tuple[DeviceMesh, DTensor]:
    """Its mesh, and what an operation made of a tensor on it."""
    assert start_group(ALONE)
    try:
        mesh = init_device_mesh("cpu", (1,))
        return mesh, DTensor.from_local(torch.ones(4, 2), mesh, [Shard(0)]).view(2, 2, 2)
    finally:
        dist.destroy_process_group()


def test_tensors_of_a_new_world_are_on_its_own_mesh() -> None:
    old, _ = a_world()
    new, made = a_world()
    assert new == old and new is not old
    assert made.device_mesh is new
