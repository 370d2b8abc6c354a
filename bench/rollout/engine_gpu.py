"""One engine, three ways to it: in process, through its worker, through the gateway. Image requests, all at once.

    python bench/rollout/engine_gpu.py                       # 256 requests at once, bfloat16: one GPU
    python bench/rollout/engine_gpu.py --requests 8 --tokens 16 --dtype float32 --kv-bytes 67108864     # the same on a CPU

Without --model a tiny random Qwen2-VL is made: then the figures are overheads, and say nothing about a large model.
Each way gets the same requests in the same run, `--rounds` times; a round's time is from the first request to the last token.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient
from omnifleet.client.media import MediaClient
from omnifleet.client.rollout import RolloutClient
from omnifleet.config.services import EngineConfig, RolloutConfig
from omnifleet.processor import image_token_id
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Identity, MediaRef, Sampling, WorkerState

WHO = Identity(run="bench")
MAKE = """
import sys
from pathlib import Path
from omnifleet_trainer.tiny.checkpoint import write_checkpoint
write_checkpoint(Path(sys.argv[1]), seed=0)
"""
START_S = 400.0
Ask = Callable[[int, MediaRef], Awaitable[int]]


@dataclass
class Bench:
    """A run folder with a media service, the model and the requests."""

    options: argparse.Namespace
    folder: Path
    model: Path

    @property
    def run_dir(self) -> Path:
        """Recipe, tokens and records."""
        return self.folder / "run"

    @property
    def engine(self) -> dict[str, Any]:
        """Settings of the engine, the same for each way."""
        settings: dict[str, Any] = {
            "dtype": self.options.dtype,
            "max_model_len": 1024,
            "max_num_seqs": self.options.requests,
            "images_per_prompt": 1,
        }
        if self.options.kv_bytes:
            settings |= {"kv_cache_memory_bytes": self.options.kv_bytes, "block_size": 32}
        return settings

    def secret(self, scope: Scope) -> str:
        """A token of the run."""
        return load_tokens(self.run_dir).secret(scope)

    def sampling(self, seed: int) -> Sampling:
        """Replies of equal length."""
        return Sampling(max_tokens=self.options.tokens, seed=seed, ignore_eos=True)

    @property
    def prompt(self) -> list[int]:
        """One picture and some text."""
        return [40, image_token_id(self.model), 41, 42, 43, 44]

    @asynccontextmanager
    async def process(self, module: str, app: str, name: str, *more: str) -> AsyncIterator[str]:
        """A service as a process; its gRPC address once it is up."""
        code = f"from {module}.cli import {app}; {app}()"
        with (self.folder / f"{name}.log").open("wb") as log:
            child = subprocess.Popen(  # noqa: ASYNC220
                [sys.executable, "-c", code, "serve", "--run-dir", str(self.run_dir), *more],
                stdout=log,
                stderr=log,
            )
        try:
            yield await self._address(child, name)
        finally:
            child.terminate()
            try:
                await asyncio.to_thread(child.wait, 30)
            except subprocess.TimeoutExpired:
                child.kill()

    async def _address(self, child: subprocess.Popen[bytes], name: str) -> str:
        end = time.monotonic() + START_S
        while time.monotonic() < end and child.poll() is None:
            record = read_records(self.run_dir).get(name)
            if record is not None:
                return record.grpc
            await asyncio.sleep(0.1)
        raise SystemExit(f"{name} did not come up:\n" + (self.folder / f"{name}.log").read_text()[-4000:])

    async def pictures(self, media: str) -> list[MediaRef]:
        """Distinct pictures of noise, put into the media service at this address."""
        refs = []
        async with MediaClient.open(media, self.secret(Scope.SERVICE)) as client:
            for seed in range(self.options.pictures):
                pixels = np.random.default_rng(seed).integers(0, 256, (112, 168, 3), np.uint8)
                out = io.BytesIO()
                Image.fromarray(pixels).save(out, "PNG")
                refs.append(await client.put_image(out.getvalue(), "bench"))
        return refs

    async def measure(self, way: str, ask: Ask, pictures: Sequence[MediaRef]) -> dict[str, Any]:
        """Rounds of all requests at once; the first one warms up and does not count."""
        rates, seconds = [], []
        for number in range(1 + self.options.rounds):
            began = time.monotonic()
            counts = await asyncio.gather(
                *(
                    ask(1000 * (number + 1) + i, pictures[i % len(pictures)])
                    for i in range(self.options.requests)
                )
            )
            took = time.monotonic() - began
            assert sum(counts) > 0
            if number > 0:
                rates.append(sum(counts) / took)
                seconds.append(took)
        return {"way": way, "tokens_per_s": statistics.median(rates), "round_s": statistics.median(seconds)}


async def in_process(bench: Bench, media_address: str) -> dict[str, Any]:
    """The adapter in this process: no wire of ours."""
    from omnifleet_rollout.engine.port import EngineRequest
    from omnifleet_rollout.engine.vllm_engine import VllmEngine

    async def find_media() -> str:
        return media_address

    config = RolloutConfig(engine=EngineConfig(**bench.engine))
    engine = VllmEngine(bench.model, config, find_media=find_media, secret=bench.secret(Scope.SERVICE))
    await engine.start()  # before any gRPC here: on CPU the engine's process is forked from this one
    print(f"engine: {engine.facts.info}", file=sys.stderr)

    async def ask(seed: int, ref: MediaRef) -> int:
        prompt = await engine.prepare(bench.prompt, [ref], "bench")
        request = EngineRequest(f"r{seed}", prompt, bench.sampling(seed), salt="bench")
        count = 0
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                count += len(delta.token_ids)
        return count

    try:
        return await bench.measure("in process", ask, await bench.pictures(media_address))
    finally:
        await engine.shutdown()


async def over_grpc(
    bench: Bench, way: str, address: str, scope: Scope, pictures: Sequence[MediaRef]
) -> dict[str, Any]:
    """A worker or a gateway, asked as a trainer asks."""
    async with RolloutClient.open(address, bench.secret(scope)) as client:

        async def ask(seed: int, ref: MediaRef) -> int:
            reply = await client.generate(
                prompt_token_ids=bench.prompt,
                media=[ref],
                sampling=bench.sampling(seed),
                identity=WHO,
                deadline_s=300,
            )
            return len(reply.samples[0].token_ids)

        return await bench.measure(way, ask, pictures)


async def until_ready(bench: Bench, gateway: str) -> None:
    async with FleetClient.open(gateway, bench.secret(Scope.OPERATOR)) as fleet, asyncio.timeout(START_S):
        async for view in fleet.watch():
            if any(worker.state is WorkerState.READY for worker in view.workers):
                return


async def run(bench: Bench) -> list[dict[str, Any]]:
    rows = []
    async with bench.process("omnifleet_media", "app", "media") as media:
        rows.append(await in_process(bench, media))
        pictures = await bench.pictures(media)
        model = ("--model", str(bench.model))
        async with (
            bench.process("omnifleet_rollout", "gateway_app", "gateway") as gateway,
            bench.process("omnifleet_rollout", "app", "worker-0", *model) as worker,
        ):
            await until_ready(bench, gateway)
            rows.append(await over_grpc(bench, "worker", worker, Scope.TRAINER, pictures))
            rows.append(await over_grpc(bench, "gateway", gateway, Scope.TRAINER, pictures))
    return rows


def main() -> None:
    """Print a table; with --json, one line a way."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-bytes", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="omnifleet-bench-") as scratch:
        folder = Path(scratch)
        model = options.model or folder / "model"
        if options.model is None:
            subprocess.run([sys.executable, "-c", MAKE, str(model)], check=True)
        bench = Bench(options, folder, model)
        bench.run_dir.mkdir()
        # JSON is YAML: no need for another library here.
        recipe = {
            "model": {"path": str(model)},
            "rollout": {"engine": bench.engine},
            "gateway": {"queue_per_worker": max(64, options.requests)},
        }
        (bench.run_dir / "recipe.yaml").write_text(json.dumps(recipe))
        rows = asyncio.run(run(bench))
    base = rows[0]["tokens_per_s"]
    for row in rows:
        row["of_in_process"] = row["tokens_per_s"] / base
        if options.json:
            print(json.dumps(row))
    if not options.json:
        print(
            f"\n{options.requests} requests at once, {options.tokens} tokens each, {options.pictures} pictures\n"
        )
        print("| way | tokens/s | of in process | round, s |\n|---|---|---|---|")
        for row in rows:
            print(
                f"| {row['way']} | {row['tokens_per_s']:.0f} | {row['of_in_process']:.0%} | {row['round_s']:.2f} |"
            )


if __name__ == "__main__":
    main()
