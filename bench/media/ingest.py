"""What ingest costs over decoding alone: 1,000 JPEGs and 20 H.264 clips through the service, and through bare libraries.

    python bench/media/ingest.py [--processes 1] [--rounds 3] [--pictures 1000] [--clips 20] [--share auto|put|read]
                                   [--only pictures|clips] [--ways memory,durable,single]

Bare: so many processes that read bytes from memory and decode them with Pillow or TorchCodec, and keep nothing. Service:
a media service in a process of its own with so many decoder processes; a client puts the same bytes over gRPC, and each
put is decoded, hashed, written and indexed before its acknowledgement. `memory` and `durable`: `put_many`, several sources
a message; `single`: one call a source, `memory` acknowledgements. Rounds alternate; the best of each is compared. With
each goes the processor time that a file took, and the pages that had to be faulted in for it.
"""

from __future__ import annotations

import argparse
import asyncio
import io
import json
import os
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import psutil
import uvloop
from PIL import Image
from work import own_work, tell, work_of

FRAMES = 32
WIDTH, HEIGHT = 640, 480
CLIP_FRAMES, CLIP_FPS = 150, 30
AHEAD = 4  # puts under way for each decoder process
WARM_UP = 64
WAYS = ("memory", "durable", "single")


def main() -> None:
    """Print one table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--pictures", type=int, default=1_000)
    parser.add_argument("--clips", type=int, default=20)
    parser.add_argument(
        "--share", choices=("auto", "put", "read"), default="auto", help="media.shared_memory_when"
    )
    parser.add_argument("--only", choices=("pictures", "clips"), default="", help="default: both")
    parser.add_argument("--ways", default=",".join(WAYS), help="how the client puts")
    parser.add_argument("--role", default="", help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role == "serve":
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:  # as a service's own process does
            runner.run(serve(arguments.folder, arguments.processes, arguments.share))
    elif arguments.role:
        decode_bare(arguments.role, arguments.processes)
    else:
        compare(arguments)


def compare(arguments: argparse.Namespace) -> None:
    """Alternate and keep the best rate of each."""
    processes, rounds, share = arguments.processes, arguments.rounds, arguments.share
    ways = arguments.ways.split(",")
    sources: dict[str, list[bytes]] = {}
    if arguments.only != "clips":
        sources["pictures"] = jpegs(arguments.pictures + warm_ups("pictures"))
    if arguments.only != "pictures":
        sources["clips"] = h264s(arguments.clips + warm_ups("clips"))
    best: dict[tuple[str, str], float] = {}
    for _ in range(rounds):
        for kind, files in sources.items():
            rates = {"bare": bare(kind, files, processes)}
            rates |= asyncio.run(through_service(kind, files, processes, share, ways))
            print(f"{kind} a second: " + ", ".join(f"{way} {rate:.1f}" for way, rate in rates.items()))
            for way, rate in rates.items():
                best[kind, way] = max(rate, best.get((kind, way), 0.0))
    load = os.getloadavg()[0]
    print(
        f"{processes} decoder process(es), {os.cpu_count()} cores, load {load:.1f}, best of {rounds}, shared at {share}"
    )
    print(f"| a second | bare | {' | '.join(ways)} | {' | '.join(f'{way} / bare' for way in ways)} |")
    print(f"|---|---|{'---|' * 2 * len(ways)}")
    for kind in sources:
        alone = best[kind, "bare"]
        reached = [best[kind, way] for way in ways]
        told = [f"{alone:.1f}", *(f"{r:.1f}" for r in reached), *(f"{r / alone:.0%}" for r in reached)]
        print(f"| {kind} | {' | '.join(told)} |")


# ---------------------------------------------------------------------- sources


def jpegs(count: int) -> list[bytes]:
    """Smooth colours with some grain, which compress about as photographs do; all different."""
    rng, files = np.random.default_rng(0), []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), np.uint8)).resize(
            (WIDTH, HEIGHT), Image.Resampling.BICUBIC
        )
        grain = rng.normal(0, 6, (HEIGHT, WIDTH, 1))
        pixels = np.clip(np.asarray(coarse) + grain, 0, 255).astype(np.uint8)
        out = io.BytesIO()
        Image.fromarray(pixels).save(out, "JPEG", quality=90)
        files.append(out.getvalue())
    return files


def h264s(count: int) -> list[bytes]:
    """Five seconds each of a drifting picture, x264's defaults (B-frames, key frames every 250)."""
    rng, files = np.random.default_rng(1), []
    for _ in range(count):
        wide = Image.fromarray(rng.integers(0, 256, (12, 24, 3), np.uint8)).resize(
            (WIDTH + CLIP_FRAMES, HEIGHT)
        )
        canvas, out = np.asarray(wide), io.BytesIO()
        with av.open(out, "w", format="mp4") as sink:
            stream: Any = sink.add_stream("libx264", rate=Fraction(CLIP_FPS))
            stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
            for i in range(CLIP_FRAMES):
                frame = np.ascontiguousarray(canvas[:, i : i + WIDTH])
                sink.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
            sink.mux(stream.encode())
        files.append(out.getvalue())
    return files


# ---------------------------------------------------------------------- bare


def bare(kind: str, files: Sequence[bytes], processes: int) -> float:
    """Files a second of `processes` processes that decode and keep nothing."""
    command = [sys.executable, __file__, "--role", kind, "--processes", str(processes)]
    children = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) for _ in range(processes)
    ]
    for i, child in enumerate(children):
        assert child.stdin and child.stdout
        for data in files[i::processes]:
            child.stdin.write(struct.pack("<Q", len(data)) + data)
        child.stdin.write(struct.pack("<Q", 0))
        child.stdin.flush()
        assert child.stdout.readline() == b"ready\n"
    for child in children:
        assert child.stdin
        child.stdin.write(b"go\n")
        child.stdin.flush()
    said = [child.communicate()[0].split() for child in children]
    walls, busy, faults = ([float(said_of_it[i]) for said_of_it in said] for i in range(3))
    count = len(files) - warm_ups(kind)
    tell(kind, "bare", {"bare": (sum(busy), sum(faults))}, count)
    return count / max(walls)


def decode_bare(kind: str, processes: int) -> None:
    """One such process: take all bytes, warm up, wait for the word, decode, say how many seconds that took."""
    files, read = [], sys.stdin.buffer.read
    while size := struct.unpack("<Q", read(8))[0]:
        files.append(read(size))
    decode = (
        decode_picture
        if kind == "pictures"
        else clip_decoder(max(1, len(os.sched_getaffinity(0)) // processes))
    )
    first = max(1, warm_ups(kind) // processes)
    for data in files[:first]:
        decode(data)
    print("ready", flush=True)
    sys.stdin.buffer.readline()
    started, (busy, faults) = time.perf_counter(), own_work()
    for data in files[first:]:
        decode(data)
    ended, (busy_then, faults_then) = time.perf_counter(), own_work()
    print(ended - started, busy_then - busy, faults_then - faults, flush=True)


def decode_picture(data: bytes) -> Any:
    """Pixels by Pillow alone."""
    return np.asarray(Image.open(io.BytesIO(data)).convert("RGB"))


def clip_decoder(threads: int) -> Any:
    """Pixels of FRAMES frames by TorchCodec alone, with the settings of the service."""
    import torch
    from torchcodec.decoders import VideoDecoder

    torch.set_num_threads(1)

    def decode(data: bytes) -> Any:
        decoder = VideoDecoder(data, dimension_order="NHWC", seek_mode="exact", num_ffmpeg_threads=threads)
        indices = (
            np.floor(np.linspace(0, (decoder.metadata.num_frames or 1) - 1, FRAMES)).astype(int).tolist()
        )
        return decoder.get_frames_at(indices=indices).data.numpy()

    return decode


def warm_ups(kind: str) -> int:
    """Files that are not counted."""
    return WARM_UP if kind == "pictures" else 4


# ---------------------------------------------------------------------- the service


async def through_service(
    kind: str, files: Sequence[bytes], processes: int, share: str, ways: Sequence[str]
) -> dict[str, float]:
    """Files a second that a client puts, by kind of acknowledgement; a fresh service for each."""
    rates = {}
    for way in ways:
        with tempfile.TemporaryDirectory() as folder:
            command = [
                sys.executable,
                __file__,
                "--role",
                "serve",
                "--folder",
                folder,
                "--processes",
                str(processes),
                "--share",
                share,
            ]
            with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:  # noqa: ASYNC220
                assert child.stdout and child.stdin
                address = json.loads(child.stdout.readline())
                watched = psutil.Process(child.pid)
                rates[way] = await put_all(address, kind, files, processes, way, watched)
                child.stdin.close()
    return rates


async def put_all(
    address: str, kind: str, files: Sequence[bytes], processes: int, way: str, watched: psutil.Process
) -> float:
    """Files a second: `put_many` of all of them, or `AHEAD` puts under way for each decoder process."""
    from omnifleet.client.media import MediaClient
    from omnifleet.types import MediaKind
    from omnifleet.wire import media_pb2

    media_kind = MediaKind.IMAGE if kind == "pictures" else MediaKind.VIDEO
    contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=FRAMES)
    async with MediaClient.open(address, deadline_s=300) as client:

        async def one_by_one(part: Sequence[bytes]) -> None:
            for data in part:
                reply = await client.put(data, "bench", kind=media_kind, contract=contract)
                assert reply.decoded

        async def put(part: Sequence[bytes]) -> None:
            if way == "single":
                lanes = AHEAD * processes
                await asyncio.gather(*(one_by_one(part[i::lanes]) for i in range(lanes)))
                return
            durable = way == "durable"
            answers = await client.put_many(
                part, "bench", kind=media_kind, contract=contract, durable=durable
            )
            assert all(isinstance(a, media_pb2.PutReply) and a.decoded for a in answers)

        first = warm_ups(kind)
        await put(files[:first])
        before, started = work_of(watched), time.perf_counter()
        await put(files[first:])
        elapsed, count, after = time.perf_counter() - started, len(files) - first, work_of(watched)
        tell(
            kind, way, {who: (after[who][0] - s, after[who][1] - n) for who, (s, n) in before.items()}, count
        )
        return count / elapsed


async def serve(folder: Path, processes: int, share: str) -> None:
    """A media service until its input closes."""
    from omnifleet.auth import OPEN
    from omnifleet.config.services import MediaConfig
    from omnifleet.service import freeze_heap
    from omnifleet_media.server.run import media_service

    config = MediaConfig.model_validate(
        {"decoders": processes, "processors": (), "shared_memory_when": share}
    )
    async with media_service(config, folder, OPEN) as running:
        freeze_heap()
        print(json.dumps(running.grpc), flush=True)
        await asyncio.to_thread(sys.stdin.buffer.read)


if __name__ == "__main__":
    main()
