"""Refits of a real vLLM CPU engine over a gloo group, with faults in between and at last; then the oracle: a fresh engine, spawned.

Run as `python -m tests.integration.refit_engine_child FOLDER`; prints one line of JSON.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from omnifleet.config.services import RolloutConfig
from omnifleet_rollout.engine.vllm_launch import set_environment

ENGINE = {
    "dtype": "float32",
    "max_model_len": 256,
    "max_num_seqs": 16,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "threads": 1,
    "processor_cache_gb": 0.05,
}
CONFIG = RolloutConfig.model_validate({"engine": ENGINE})
set_environment(CONFIG.engine)

import torch  # noqa: E402
from safetensors.torch import load_file, save_file  # noqa: E402

from omnifleet.errors import OmnifleetError  # noqa: E402
from omnifleet.telemetry.counters import Counters  # noqa: E402
from omnifleet.types import InFlight, WeightVersion  # noqa: E402
from omnifleet.wire.manifest import base_version  # noqa: E402
from omnifleet_rollout.engine.vllm_engine import VllmEngine  # noqa: E402
from omnifleet_rollout.refit.reception import Reception  # noqa: E402
from omnifleet_rollout.refit.shadow import no_room  # noqa: E402
from omnifleet_rollout.refit.weights import Weights  # noqa: E402

PROMPTS, HALF_WAY = 64, 10


def break_loads(flag: Path) -> None:
    """While `flag` is there, loads raise after ten tensors, in engines started from now on: they are forked from this process."""
    everything = Weights.everything

    def broken(self: Weights) -> Iterator[tuple[str, torch.Tensor]]:
        for number, item in enumerate(everything(self)):
            if number == HALF_WAY and flag.exists():
                raise OSError("the load broke half-way")
            yield item

    Weights.everything = broken


def forbid_shadows(flag: Path) -> None:
    """While `flag` is there, no stage finds room beside the weights, in engines started from now on."""
    receive = Reception.receive

    def full(self: Reception, *told: Any, **more: Any) -> Any:
        if flag.exists():
            raise no_room("no room for a shadow here")
        return receive(self, *told, **more)

    Reception.receive = full


@asynccontextmanager
async def engine_of(model: Path) -> AsyncIterator[VllmEngine]:
    async def no_media() -> str:
        raise RuntimeError("no media here")

    engine = VllmEngine(model, CONFIG, find_media=no_media, secret="")
    try:
        await engine.start()
        yield engine
    finally:
        await engine.shutdown()


async def scores(engine: VllmEngine) -> list[list[float]]:
    """Logprobs of six fixed tokens after each of 64 fixed prompts, one prompt at a time: batches change rounding."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(PROMPTS):
        ids = torch.randint(5, 200, (18,), generator=generator).tolist()
        prompt = await engine.prepare(ids[:12], (), "test")
        made.append(await engine.score(prompt, ids[12:]))
    return made


def moved(weights: dict[str, Any], step: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(step)
    return {
        name: t + 0.05 * torch.randn(t.shape, generator=generator) if "visual" not in name else t
        for name, t in weights.items()
    }


def nudged(weights: dict[str, Any]) -> dict[str, Any]:
    """The same weights, but for one value in ten tensors of the language model."""
    changed = {name: t.clone() for name, t in weights.items() if "visual" not in name}
    for name in sorted(changed)[:10]:
        changed[name].view(-1)[7] += 1
    return weights | changed


async def main(folder: Path) -> None:
    from omnifleet_rollout.refit.receiver import Receiver
    from omnifleet_rollout.worker.gate import Gate
    from omnifleet_rollout.worker.standing import Standing

    model, exported, flag = folder / "model", folder / "exported", folder / "break loads"
    full = folder / "no room"
    break_loads(flag)
    forbid_shadows(full)
    weights = load_file(model / "model.safetensors")
    async with engine_of(model) as engine:
        # No gRPC and no group before the engine is up: its process is forked from this one.
        from omnifleet_refit.group import Meeting
        from omnifleet_trainer.refit.snapshot import Snapshot

        gate = Gate(Standing("w", base_version(engine.facts.tensors)), limit=8)
        receiver = Receiver(engine, gate, Counters("engine"))
        meeting, snapshot = Meeting("127.0.0.1"), Snapshot(torch.device("cpu"), 1 << 18)
        before = await scores(engine)

        async def stage(
            step: int, *, now: dict[str, Any] | None = None, broken: bool = False, few: bool = False
        ) -> str:
            now, held = moved(weights, step) if now is None else now, dict(snapshot.digests)
            snapshot.pack(now.items(), {n for n in weights if "visual" not in n}, sparse=few)
            version = WeightVersion("r", "l", step)
            shipment = snapshot.shipment(version, None, None, True)
            if few:
                whole, small = shipment.bytes, snapshot.step_on(version, gate.standing.version, held, False)
                assert small is not None and 4 * small.bytes < whole
                shipment = small
            name = meeting.new_name()
            source = f"group://127.0.0.1:{meeting.port}/{name}?rank=1&size=2&deadline_s=30"

            def send() -> None:
                import time

                group = meeting.open_group(name, 2, torch.device("cpu"), 30)
                group.await_ready(time.monotonic() + 30)
                for number, bucket in enumerate(snapshot.contents(shipment)):
                    data = bucket.clone()
                    if broken and number == 1:
                        data[77] ^= 1
                    group.broadcast(data, time.monotonic() + 30)

            sending = asyncio.create_task(asyncio.to_thread(send))
            try:
                digest, _ = await receiver.stage(shipment.manifest, source, 60, InFlight.RECOMPUTE)
            finally:
                await asyncio.gather(sending, return_exceptions=True)
            return digest

        await receiver.commit(await stage(1), InFlight.KEEP, 60)
        first = await scores(engine)
        try:
            await stage(2, broken=True)
            refused = ""
        except OmnifleetError as error:
            refused = error.message
        after_fault = await scores(engine)
        await receiver.abort("")
        await receiver.commit(await stage(3), InFlight.RECOMPUTE, 60)
        last = nudged(moved(weights, 3))
        await receiver.commit(await stage(4, now=last, few=True), InFlight.RECOMPUTE, 60)
        ours = await scores(engine)
        flag.touch()
        half = await stage(5)
        try:
            await receiver.commit(half, InFlight.RECOMPUTE, 60)
            fenced = ""
        except OmnifleetError as error:
            fenced = error.reason if gate.standing.fence else ""
        flag.unlink()
        await receiver.commit(await stage(6, now=last), InFlight.RECOMPUTE, 60)
        mended = await scores(engine)
        full.touch()
        try:
            await stage(7, broken=True)
            in_place = ""
        except OmnifleetError as error:
            in_place = error.message if gate.standing.fence else ""
        await receiver.commit(await stage(8, now=last), InFlight.RECOMPUTE, 60)
        placed = await scores(engine)
        version, fence = gate.standing.version.number, gate.standing.fence
    shutil.copytree(model, exported)
    save_file(last, exported / "model.safetensors", metadata={"format": "pt"})
    async with engine_of(exported) as fresh:
        theirs = await scores(fresh)
    print("RESULT " + json.dumps({"moved": before != first, "refused": refused, "kept": after_fault == first,
                                  "version": version, "fenced": fenced, "fence": fence, "ours": ours, "mended": mended,
                                  "in_place": in_place, "placed": placed, "theirs": theirs}))  # fmt: skip


if __name__ == "__main__":
    asyncio.run(main(Path(sys.argv[1])))
