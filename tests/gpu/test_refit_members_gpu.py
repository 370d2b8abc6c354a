"""NCCL with several receivers, each on a GPU of its own: groups made and remade, one killed in the middle of a broadcast.

Light engines (`tests/refit_world.py`), no vLLM: seconds. Three GPUs or more: the sender's, and two receivers' at least.
Run: python -m pytest tests/gpu/test_refit_members_gpu.py -m gpu
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch

from omnifleet.errors import OmnifleetError
from omnifleet.types import InFlight
from tests.chaos.test_refit_faults import Hooked, kill, remotes, spawner, state
from tests.refit_model import write_checkpoint
from tests.refit_world import DEADLINE_S, Remote, Sender

__all__ = ["spawner"]
pytestmark = [pytest.mark.gpu, pytest.mark.timeout(400)]
SENDER = torch.device("cuda", 0)


async def test_groups_of_several_receivers_are_kept_broken_and_remade(spawner: Any, tmp_path: Path) -> None:
    count = torch.cuda.device_count() - 1
    if count < 2:
        pytest.skip("needs three GPUs")
    checkpoint = write_checkpoint(tmp_path / "c")
    async with AsyncExitStack() as stack:

        async def join(number: int) -> Remote:
            told = {"first": number, "device": f"cuda:{1 + number % count}"}
            (worker,) = await stack.enter_async_context(remotes(spawner, checkpoint, 1, **told))
            return worker

        workers = [await join(number) for number in range(count)]
        sender, names = Sender(device=SENDER), []
        for step in range(3):
            await sender.publish(workers, step)
            names.append(sender.courier._name)
            assert [await state(worker) for worker in workers] == [(False, step, True)] * count
        assert len(set(names)) == 1, "one communicator, kept"
        victim = workers[-1]
        shipment = sender.pack(3)
        torch.cuda.synchronize(SENDER)
        killed = Hooked(sender.buckets(shipment), lambda: kill(victim.process))
        outcomes = await sender.stage(workers, shipment, killed)
        assert isinstance(outcomes[victim.id], OmnifleetError)
        workers.remove(victim)
        for worker in workers:
            outcome = outcomes[worker.id]
            assert isinstance(outcome, str), outcome
            await worker.client.commit(outcome, InFlight.KEEP, deadline_s=DEADLINE_S)
        sender.took(shipment)
        assert [await state(worker) for worker in workers] == [(False, 3, True)] * (count - 1)
        workers.append(await join(2 * count - 1))  # on the GPU of the one that died
        await sender.publish(workers, 4, whole=True)
        names.append(sender.courier._name)
        assert [await state(worker) for worker in workers] == [(False, 4, True)] * count
        assert len(set(names)) == 2, "remade for the newcomer"
        sender.courier.close()
