"""A worker for the bench: our services around one vLLM engine, requests that never end, and the stock refit path.

Orders come as JSON lines on stdin, answers go as JSON lines to the file descriptor in argv; see `Orders`.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from contextlib import aclosing
from pathlib import Path
from typing import Any

from phases import Phases

from omnifleet.auth import OPEN
from omnifleet.config.services import RolloutConfig
from omnifleet.types import Sampling
from omnifleet.wire.server import serving
from omnifleet_rollout.engine.port import EnginePrompt, EngineRequest
from omnifleet_rollout.engine.vllm_engine import VllmEngine
from omnifleet_rollout.worker.command import Worker

RUNNING = 8
REPLY = 1500


class Load:
    """Requests without end. `gap`: the longest time in which no token of any of them came, since the last look."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine
        self._last = time.monotonic()
        self._gap = 0.0
        self.tokens = 0

    async def run(self, slot: int) -> None:
        """One request after another."""
        sampling = Sampling(max_tokens=REPLY, ignore_eos=True, seed=slot)
        for turn in range(10**6):
            request = EngineRequest(f"load-{slot}-{turn}", EnginePrompt([5] * 32), sampling, salt=str(turn))
            async with aclosing(self._engine.generate(request)) as deltas:
                async for delta in deltas:
                    now = time.monotonic()
                    self._gap, self._last = max(self._gap, now - self._last), now
                    self.tokens += len(delta.token_ids)

    def gap(self) -> float:
        """Seconds; counting starts anew."""
        gap, self._gap = max(self._gap, time.monotonic() - self._last), 0.0
        return gap


class Orders:
    """gap: reset and tell; load_ms: of the last commit, inside; phases: what the engine was called for since the last look;
    stock_init: meet the trainer; stock: one refit of vLLM's own packed NCCL engine."""

    def __init__(self, engine: VllmEngine, load: Load, out: Any) -> None:
        self._engine, self._llm, self._load, self._out = engine, engine._llm, load, out
        self._phases = Phases()
        self._phases.watch(engine, "stage", "pause", "commit", "resume")

    def say(self, **answer: Any) -> None:
        """Answer."""
        self._out.write(json.dumps(answer) + "\n")
        self._out.flush()

    async def gap(self, order: dict[str, Any]) -> None:
        """See the class."""
        self.say(gap=self._load.gap(), tokens=self._load.tokens)

    async def load_ms(self, order: dict[str, Any]) -> None:
        """See the class."""
        self.say(ms=(await self._engine._rpc("omni_counters"))["last_load_ms"])

    async def phases(self, order: dict[str, Any]) -> None:
        """See the class."""
        self.say(calls=self._phases.taken())

    async def stock_init(self, order: dict[str, Any]) -> None:
        """See the class."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=order["init"]))
        self.say(ok=True)

    async def stock(self, order: dict[str, Any]) -> None:
        """See the class."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._llm.pause_generation(mode="keep", clear_cache=False)
        await self._llm.start_weight_update()
        self.say(started=True)
        await self._llm.update_weights(WeightTransferUpdateRequest(update_info=order["update"]))
        await self._llm.finish_weight_update()
        self.say(finished=True)
        await self._llm.resume_generation()
        self.say(resumed=True)


def use_stock_refit_too() -> None:
    """Weights need not be read, and vLLM's NCCL engine stands by in the same process."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine import arg_utils

    class Arguments(arg_utils.AsyncEngineArgs):  # type: ignore[misc]
        def __post_init__(self) -> None:
            self.load_format = "dummy"
            self.weight_transfer_config = WeightTransferConfig(backend="nccl")
            super().__post_init__()

    arg_utils.AsyncEngineArgs = Arguments


async def main(model: Path, engine_json: str, answers: int) -> None:
    config = RolloutConfig.model_validate({"engine": json.loads(engine_json)})

    async def no_media() -> str:
        raise RuntimeError("no media here")

    engine = VllmEngine(model, config, find_media=no_media, secret="")
    began = time.monotonic()
    await engine.start()
    worker = Worker(engine, "bench", config, OPEN)
    load = Load(engine)
    with os.fdopen(answers, "w") as out:
        orders = Orders(engine, load, out)
        async with serving("127.0.0.1:0", worker.register, tokens=OPEN, knob="bench", grace_s=0.1) as address:
            tasks = [asyncio.create_task(load.run(slot)) for slot in range(RUNNING)]
            orders.say(address=address, start_s=time.monotonic() - began)
            while line := await asyncio.to_thread(sys.stdin.readline):
                order = json.loads(line)
                await getattr(orders, order["do"])(order)
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
    await engine.shutdown()


if __name__ == "__main__":
    from omnifleet_rollout.engine.vllm_launch import set_environment

    settings = RolloutConfig.model_validate({"engine": json.loads(sys.argv[2])})
    set_environment(settings.engine)
    use_stock_refit_too()
    asyncio.run(main(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3])))
