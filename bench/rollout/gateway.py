"""What the gateway costs, against calling the engine in its own process, all in one run on one machine.

    python bench/rollout/gateway.py                           # on the CPU
    python bench/rollout/gateway.py --dtype bfloat16          # on a GPU: then the engine leaves the cores to the others

A real vLLM engine with a tiny random Qwen2-VL serves inside this process; gateway, media service and the client that
asks through the gateway are processes of their own. Direct and gateway rounds alternate. Prints added latency, throughput
at saturation, bytes a token of each dialect, and processor and encoder runs of an image-heavy load.

At saturation the CPU time of each process is counted too. Where the machine has no cores to spare, the gateway and the
client take theirs from the engine; so there is one more way, *beside*: the direct one while a process that does nothing for it
uses as much CPU as gateway and client did. What is between it and the gateway is not explained by too few cores.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import logging
import os
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import uvloop
from clients import WAYS, all_clients, prompt, sampling
from PIL import Image
from stack import WHO, Ask, Load, drive, processes_cpu, stack

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.client.rollout import RolloutClient
from omnifleet.service import load_tokens, read_records
from omnifleet.types import MediaRef
from omnifleet.wire import rollout_pb2, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import sampling_to_wire
from omnifleet_rollout.engine.port import EngineRequest
from omnifleet_rollout.engine.vllm_engine import VllmEngine

ENGINE = {
    "max_model_len": 1024,
    "max_num_seqs": 32,
    "kv_cache_memory_bytes": 256 << 20,
    "block_size": 32,
    "threads": 1,
    "processor_cache_gb": 0.25,
    "enable_prefix_caching": False,
    "media_tokens": "ban",  # a sampled placeholder would end a reply early
}
_TURN, _TURNS = 6, 20  # requests of a turn; turns a round
_ADDED = ("worker", "grpc", "http", "httpx")


def direct(engine: VllmEngine, *, in_bulk: bool = True) -> Ask:
    """The engine's own generator, in this process. in_bulk: as the gateway asks for a whole reply; else token by token."""

    async def ask(number: int, tokens: int) -> int:
        made = 0
        prepared = await engine.prepare(prompt(number), [], "bench")
        name = f"direct-{time.time_ns()}-{number}"
        request = EngineRequest(name, prepared, sampling(number, tokens), salt="bench", in_bulk=in_bulk)
        async with aclosing(engine.generate(request)) as deltas:
            async for delta in deltas:
                made += len(delta.token_ids)
        return made

    return ask


# ---------------------------------------------------------------- what is measured


async def latency(run_dir: Path, engine: VllmEngine, rounds: int) -> None:
    """One request at a time: what is added to a first token and to a short reply by the worker's wire, then by the gateway.

    The ways take turns of a few requests, forwards and backwards, so that an engine which gets slower or faster shows in all of
    them alike; what is added is the median over turns of the difference to the direct way's own turn. A turn's first request is
    not counted: its caller was idle.
    """
    async with all_clients(WAYS, run_dir) as clients:
        ways = ["direct", *WAYS]
        for tokens in (1, 16):
            load = Load(1, _TURN, tokens)
            found: dict[str, list[float]] = {way: [] for way in ways}
            for number in range(_TURNS * rounds):
                for way in ways[:: -1 if number % 2 else 1]:
                    asked = drive(load, direct(engine)) if way == "direct" else clients[way].round(load)
                    found[way].append(1000 * statistics.median((await asked).seconds[1:]))
            print(f"latency, {tokens} tokens, medians of {len(found['direct'])} turns of {_TURN - 1}, ms")
            for way, turns in found.items():
                more = [ms - base for ms, base in zip(turns, found["direct"], strict=True)]
                low, middle, high = statistics.quantiles(more, n=4)
                added = f"; added {middle:+.2f} ({low:+.2f} to {high:+.2f})" if way in _ADDED else ""
                print(f"  {way}: {statistics.median(turns):.2f}{added}")


async def saturation(run_dir: Path, engine: VllmEngine, rounds: int) -> None:
    """More requests than the engine runs at once: tokens a second, and who used the CPU."""
    load = Load(48, 432, 64)
    tokens = load.requests * load.tokens
    rates: dict[str, list[float]] = {}
    cpu: dict[str, dict[str, float]] = {}
    async with all_clients(("grpc", "http"), run_dir) as clients:
        for _ in range(rounds):
            for way in ("token by token", "direct", "grpc", "http", "beside"):
                before = processes_cpu()
                if way in clients:
                    found = await clients[way].round(load)
                elif way == "beside":
                    share = (cpu["grpc"]["gateway"] + cpu["grpc"]["client"]) * rates["grpc"][-1] / 1e6
                    async with burning(share):
                        found = await drive(load, direct(engine))
                else:
                    found = await drive(load, direct(engine, in_bulk=way == "direct"))
                used = {name: seconds - before.get(name, 0.0) for name, seconds in processes_cpu().items()}
                rates.setdefault(way, []).append(tokens / found.wall)
                cpu[way] = {name: 1e6 * seconds / tokens for name, seconds in used.items()}
    best = max(statistics.median(rates["direct"]), statistics.median(rates["token by token"]))
    print(f"saturation, {load.at_once} requests at once, {load.tokens} tokens each; medians of {rounds}")
    for way, found_rates in rates.items():
        middle = statistics.median(found_rates)
        spent = ", ".join(f"{name} {us:.0f}" for name, us in cpu[way].items() if us >= 1)
        print(f"  {way}: {middle:.0f} tokens/s, {100 * middle / best:.1f} %; us of CPU a token: {spent}")
    print("  rounds: " + "; ".join(f"{way} {', '.join(f'{x:.0f}' for x in xs)}" for way, xs in rates.items()))


@asynccontextmanager
async def burning(cores: float) -> AsyncIterator[None]:
    """A process beside that uses this many cores (at most one) in turns of 10 ms, for nothing."""
    code = (
        "import sys, time\nshare = min(1.0, float(sys.argv[1]))\n"
        "while True:\n    end = time.process_time() + 0.01 * share\n"
        "    while time.process_time() < end: pass\n    time.sleep(0.01 * (1 - share))\n"
    )
    process = await asyncio.create_subprocess_exec(sys.executable, "-c", code, str(cores))
    try:
        yield
    finally:
        process.terminate()
        await process.wait()


async def bytes_per_token(run_dir: Path, tokens: int = 512) -> None:
    """Bytes of one reply with ids, logprobs and versions of all its tokens, by dialect; the prompt has 32 tokens."""
    secret = load_tokens(run_dir).secret(Scope.TRAINER)
    record = read_records(run_dir)["gateway"]
    full = {"seed": 1, "ignore_eos": True, "return_token_ids": True}
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, **full}
    bodies: dict[str, tuple[str, dict[str, Any]]] = {
        "chat completions": ("/v1/chat/completions", chat),
        "chat completions, streamed": ("/v1/chat/completions", {**chat, "stream": True}),
        "completions": ("/v1/completions", {"prompt": prompt(1), "max_tokens": tokens, **full}),
        "Responses": ("/v1/responses", {"input": "hi", "max_output_tokens": tokens, **full}),
    }
    sizes: dict[str, float] = {}
    headers = {"authorization": f"Bearer {secret}"}
    async with httpx.AsyncClient(base_url=f"http://{record.http}", headers=headers, timeout=120) as http:
        for name, (path, body) in bodies.items():
            reply = await http.post(path, json=body)
            assert reply.status_code == 200, reply.text
            sizes[name] = len(reply.content) / tokens
    async with open_channel(record.grpc, secret) as channel:
        stub = rollout_pb2_grpc.RolloutStub(channel)  # type: ignore[no-untyped-call]
        for name, whole in (("gRPC, streamed", False), ("gRPC, whole samples", True)):
            request = rollout_pb2.GenerateRequest(
                tokens=rollout_pb2.TokenPrompt(token_ids=prompt(1)),
                sampling=sampling_to_wire(sampling(1, tokens)),
                whole_samples=whole,
            )
            sizes[name] = (
                sum([event.ByteSize() async for event in stub.Generate(request, timeout=120)]) / tokens
            )
    for name, size in sizes.items():
        print(f"bytes a token, {name}: {size:.1f}")


async def image_heavy(run_dir: Path, engine: VllmEngine, pictures: int = 16, each: int = 16) -> None:
    """`each` generations of each picture, twice: how often the processor and the encoder ran."""
    secret = load_tokens(run_dir).secret(Scope.SERVICE)
    records = read_records(run_dir)
    async with (
        MediaClient.open(records["media"].grpc, secret) as media,
        RolloutClient.open(records["gateway"].grpc, secret) as client,
    ):
        refs = [await media.put_image(picture(number), "bench") for number in range(pictures)]
        assert len({ref.digest for ref in refs}) == pictures

        async def runs() -> tuple[float, float, float]:
            await engine.refresh()
            counters, made = engine.stats().counters, (await media.status()).counters
            return made.get("segments_computed", 0.0), counters["encoder_items"], counters["pictures_sent"]

        async def ask(ref: MediaRef, number: int) -> None:
            reply = await client.generate(
                prompt_token_ids=[40, image_token(engine), 41, 42],
                media=[ref],
                sampling=sampling(number, 4, n=each),
                identity=WHO,
                deadline_s=120,
            )
            assert not reply.failures, reply.failures

        before = await runs()
        began = time.perf_counter()
        for _ in range(2):
            await asyncio.gather(*(ask(ref, number) for number, ref in enumerate(refs)))
        wall, after = time.perf_counter() - began, await runs()
    made, encoded, sent = ((b - a) / pictures for a, b in zip(before, after, strict=True))
    print(
        f"image-heavy, {2 * each} generations of each of {pictures} pictures in {wall:.1f} s: processor runs {made:.2f}, "
        f"encoder runs {encoded:.2f}, pixels sent to the engine {sent:.2f} a distinct picture"
    )


def picture(number: int) -> bytes:
    out = io.BytesIO()
    Image.new("RGB", (84, 84), (number * 15, 40, 90)).save(out, "PNG")
    return out.getvalue()


def image_token(engine: VllmEngine) -> int:
    from omnifleet.processor import image_token_id

    return image_token_id(Path(engine.facts.model))


async def measure(rounds: int, only: str | None, dtype: str) -> None:
    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    with tempfile.TemporaryDirectory(prefix="omnifleet-bench-") as folder:
        run_dir, model = Path(folder) / "run", Path(folder) / "model"
        run_dir.mkdir()
        write_checkpoint(model, seed=0)
        async with stack(run_dir, model, {**ENGINE, "dtype": dtype}) as engine:
            print(f"{engine.facts.info}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f} at the start")
            await drive(Load(4, 8, 8), direct(engine))
            measurements: dict[str, Callable[[], Awaitable[None]]] = {
                "latency": lambda: latency(run_dir, engine, rounds),
                "saturation": lambda: saturation(run_dir, engine, rounds),
                "bytes": lambda: bytes_per_token(run_dir),
                "images": lambda: image_heavy(run_dir, engine),
            }
            for name, step in measurements.items():
                if only in (None, name):
                    await step()


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    options.add_argument("--rounds", type=int, default=3, help="rounds of each way; medians are printed")
    options.add_argument(
        "--only", choices=("latency", "saturation", "bytes", "images"), help="one of the measurements"
    )
    options.add_argument("--dtype", default="float32", help="of the engine; bfloat16 on a GPU")
    asked = options.parse_args()
    logging.getLogger("omnifleet").setLevel(logging.WARNING)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a worker's own process does
        runner.run(measure(asked.rounds, asked.only, asked.dtype))


if __name__ == "__main__":
    main()
