"""One engine, four ways to it: in process (token by token, in bulk), its worker, the gateway. Image requests, all at once.

    python bench/rollout/engine_gpu.py                       # 256 requests at once, bfloat16: one GPU
    python bench/rollout/engine_gpu.py --requests 8 --tokens 16 --dtype float32 --kv-bytes 67108864     # the same on a CPU

Without --model a random Qwen2-VL of --size is made. The figures of a tiny one are overheads; none has trained weights.
Each way gets the same requests in the same run, `--rounds` times; a round's time is from the first request to the last token. As
one request ends the next begins, `--waves` times over.
The engine's front and its worker share this process, so an engine starts once; gateway, media service and client have their own.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import logging
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import uvloop
from PIL import Image
from stack import WHO, Ask, Load, Round, drive, output_of, processes_cpu, stack

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.client.rollout import RolloutClient
from omnifleet.processor import image_token_id
from omnifleet.service import load_tokens, read_records
from omnifleet.types import MediaRef, Sampling
from omnifleet_rollout.engine.port import EngineRequest
from omnifleet_rollout.engine.vllm_engine import VllmEngine

MAKE = """
import sys
from pathlib import Path
from sizes import write_size
write_size(sys.argv[2], Path(sys.argv[1]))
"""
SIZES = Path(__file__).resolve().parents[1] / "refit"
IN_PROCESS = ("in process, token by token", "in process, in bulk")
THROUGH = {"worker": "worker-0", "gateway": "gateway"}


@dataclass(frozen=True, slots=True)
class Case:
    """What is asked, by whichever way: the run's folder, the model, how many pictures."""

    run_dir: Path
    model: Path
    pictures: int

    @property
    def prompt(self) -> list[int]:
        """One picture and some text."""
        return [40, image_token_id(self.model), 41, 42, 43, 44]

    def secret(self, scope: Scope) -> str:
        """A token of the run."""
        return load_tokens(self.run_dir).secret(scope)

    async def media(self) -> list[MediaRef]:
        """Distinct pictures of noise, in the media service."""
        refs = []
        address = read_records(self.run_dir)["media"].grpc
        async with MediaClient.open(address, self.secret(Scope.SERVICE)) as client:
            for seed in range(self.pictures):
                pixels = np.random.default_rng(seed).integers(0, 256, (112, 168, 3), np.uint8)
                out = io.BytesIO()
                Image.fromarray(pixels).save(out, "PNG")
                refs.append(await client.put_image(out.getvalue(), "bench"))
        return refs


def sampling(seed: int, tokens: int) -> Sampling:
    """Replies of equal length."""
    return Sampling(max_tokens=tokens, seed=seed, ignore_eos=True)


def direct(engine: VllmEngine, case: Case, refs: Sequence[MediaRef], *, in_bulk: bool) -> Ask:
    """The adapter in this process: no wire of ours."""
    numbers = iter(range(1 << 40))

    async def ask(number: int, tokens: int) -> int:
        prompt = await engine.prepare(case.prompt, [refs[number % len(refs)]], "bench")
        name = f"direct-{in_bulk}-{next(numbers)}"
        request = EngineRequest(name, prompt, sampling(number, tokens), salt="bench", in_bulk=in_bulk)
        made = 0
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                made += len(delta.token_ids)
        return made

    return ask


async def client_process(case: Case, way: str, load: Load, rounds: int) -> None:
    """A trainer's client of the worker or the gateway, in a process of its own: prints its rounds."""
    refs = await case.media()
    scope = Scope.SERVICE if way == "worker" else Scope.TRAINER
    address = read_records(case.run_dir)[THROUGH[way]].grpc
    async with RolloutClient.open(address, case.secret(scope)) as client:

        async def ask(number: int, tokens: int) -> int:
            reply = await client.generate(
                prompt_token_ids=case.prompt,
                media=[refs[number % len(refs)]],
                sampling=sampling(number, tokens),
                identity=WHO,
                deadline_s=300,
            )
            assert not reply.failures, reply.failures
            return len(reply.samples[0].token_ids)

        await drive(load, ask)
        print(json.dumps([asdict(await drive(load, ask)) for _ in range(rounds)]))


async def measured(case: Case, engine: VllmEngine, way: str, load: Load, rounds: int) -> dict[str, Any]:
    """Median of the rounds after one that does not count, and CPU microseconds a token by process."""
    if way in IN_PROCESS:
        ask = direct(engine, case, await case.media(), in_bulk=way == IN_PROCESS[1])
        await drive(load, ask)
        before = processes_cpu()
        found = [await drive(load, ask) for _ in range(rounds)]
        counted, clients = rounds, 0.0
    else:
        before = processes_cpu()
        options = ("--client", way, "--run-dir", str(case.run_dir), "--model", str(case.model))
        sizes = ("--requests", str(load.at_once), "--tokens", str(load.tokens), "--rounds", str(rounds))
        sizes += ("--waves", str(load.requests // load.at_once))
        pictures = ("--pictures", str(case.pictures))
        out = await output_of(__file__, *options, *sizes, *pictures)
        found = [Round(**one) for one in json.loads(out)]
        counted, clients = rounds + 1, sum(one.cpu for one in found) / rounds
    after, tokens = processes_cpu(), load.requests * load.tokens
    cpu = {name: 1e6 * (s - before.get(name, 0.0)) / (counted * tokens) for name, s in after.items()}
    if clients:
        cpu["client"] = 1e6 * clients / tokens
    wall = statistics.median(one.wall for one in found)
    return {"way": way, "tokens_per_s": tokens / wall, "round_s": wall, "cpu_us": cpu}


async def run(options: argparse.Namespace, case: Case) -> list[dict[str, Any]]:
    """Every way in turn, of one engine."""
    settings: dict[str, Any] = {
        "dtype": options.dtype,
        "max_model_len": 1024,
        "max_num_seqs": options.requests,
        "images_per_prompt": 1,
        "media_tokens": "ban",  # a sampled placeholder would end a reply early
    }
    if options.kv_bytes:
        settings |= {"kv_cache_memory_bytes": options.kv_bytes, "block_size": 32}
    load = Load(options.requests, options.waves * options.requests, options.tokens)
    queue = {"queue_per_worker": max(64, options.requests)}
    async with stack(case.run_dir, case.model, settings, gateway=queue) as engine:
        print(f"engine: {engine.facts.info}", file=sys.stderr)
        ways = (*IN_PROCESS, *THROUGH)
        return [await measured(case, engine, way, load, options.rounds) for way in ways]


def show(options: argparse.Namespace, rows: Sequence[dict[str, Any]]) -> None:
    """A table; with --json, one line a way. Shares are of the better of the two in process."""
    base = max(row["tokens_per_s"] for row in rows if row["way"] in IN_PROCESS)
    if not options.json:
        print(
            f"\n{options.size}: {options.waves * options.requests} requests, {options.requests} at once, {options.tokens} tokens "
            f"each, {options.pictures} pictures"
        )
        print("\n| way | tokens/s | of in process | round, s | CPU a token, us |\n|---|---|---|---|---|")
    for row in rows:
        row["of_in_process"] = row["tokens_per_s"] / base
        cpu = ", ".join(f"{name} {us:.0f}" for name, us in row["cpu_us"].items() if us >= 1)
        line = f"| {row['way']} | {row['tokens_per_s']:.0f} | {row['of_in_process']:.0%} | {row['round_s']:.2f} | {cpu} |"
        print(json.dumps(row) if options.json else line)


def main() -> None:
    """Print what each way gives."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--size", default="tiny", choices=["tiny", "2B", "7B"])
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--waves", type=int, default=4, help="requests in all, by those at once")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--pictures", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--kv-bytes", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--client", choices=sorted(THROUGH), help=argparse.SUPPRESS)
    parser.add_argument("--run-dir", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    logging.getLogger("omnifleet").setLevel(logging.WARNING)
    if options.client:
        case = Case(options.run_dir, options.model, options.pictures)
        load = Load(options.requests, options.waves * options.requests, options.tokens)
        asyncio.run(client_process(case, options.client, load, options.rounds))
        return
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what was started is stopped
    with tempfile.TemporaryDirectory(prefix="omnifleet-bench-") as scratch:
        model = options.model or Path(scratch) / "model"
        if options.model is None:
            model.mkdir()
            path = os.pathsep.join([str(SIZES), *filter(None, [os.environ.get("PYTHONPATH")])])
            make = [sys.executable, "-c", MAKE, str(model), options.size]
            subprocess.run(make, check=True, env={**os.environ, "PYTHONPATH": path})
        case = Case(Path(scratch) / "run", model, options.pictures)
        case.run_dir.mkdir()
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a worker's own process does
            rows = runner.run(run(options, case))
    show(options, rows)


if __name__ == "__main__":
    main()
