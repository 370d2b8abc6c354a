"""Bytes on each boundary of one GRPO step: without dedup, with interning inside each payload, with references.

    python bench/media/dedup.py

Two steps: one clip (32 frames of 672x384) with 16 generations; 64 prompts that share 8 pictures (672x384), 16 generations
each. `none` and `interned` count what pickle (protocol 5, buffers out of band) makes of the exact argument of a call.
`interned` follows the published behaviour of a system that shares by object identity within one payload: copies of a
prompt share their media; a payload is interned again whenever it is concatenated or sliced; every call and every shard
sends its own copy; equal pictures that were loaded twice are two. `references` counts the protobuf bytes of the
references that go in place of media, and below the table what the media service moved for the whole step, measured on a
running service with two reading processes' clients on its host.
"""

from __future__ import annotations

import asyncio
import io
import pickle
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omnifleet.auth import OPEN
from omnifleet.client.media import MediaClient
from omnifleet.config.services import MediaConfig
from omnifleet.types import MediaKind, MediaRef
from omnifleet.wire import media_pb2, rollout_pb2
from omnifleet.wire.codec import media_from_wire, media_to_wire
from omnifleet_media.server.run import media_service

HEIGHT, WIDTH = 384, 672
GENERATIONS, SHARDS = 16, 2
NATIVE, TENSOR = "native", "tensor"
BOUNDARIES = (  # name, what travels, how many arguments the batch is cut into (0: one a prompt)
    ("gym request", NATIVE, 1),
    ("generation", NATIVE, SHARDS),
    ("rollout to policy", TENSOR, 1),
    ("replay push", TENSOR, 0),
    ("replay sample", TENSOR, 1),
    ("policy logprobs", TENSOR, SHARDS),
    ("reference logprobs", TENSOR, SHARDS),
    ("policy train", TENSOR, SHARDS),
)


@dataclass(frozen=True)
class Step:
    """prompts x GENERATIONS samples; prompt i shows picture i % distinct, of so many frames."""

    name: str
    prompts: int
    distinct: int
    frames: int


class Interned:
    """Rows that point at segments; a segment is told apart by identity, never by content."""

    def __init__(self, segments: Sequence[Any], rows: Sequence[int]) -> None:
        self.segments, self.rows = list(segments), list(rows)

    @classmethod
    def repeat(cls, segments: Sequence[Any], times: int) -> Interned:
        """Each prompt's segment, referred to by its generations."""
        return cls(segments, [i for i in range(len(segments)) for _ in range(times)])

    def slice(self, rows: range) -> Interned:
        """Only the segments that these rows refer to, in order of first use."""
        used = list(dict.fromkeys(self.rows[i] for i in rows))
        place = {old: new for new, old in enumerate(used)}
        return Interned([self.segments[i] for i in used], [place[self.rows[i]] for i in rows])


def pickled(argument: Any) -> int:
    """Bytes of the frame and of all out-of-band buffers."""
    buffers: list[pickle.PickleBuffer] = []
    frame = pickle.dumps(argument, protocol=5, buffer_callback=buffers.append)
    return len(frame) + sum(buffer.raw().nbytes for buffer in buffers)


def array(kind: str, frames: int) -> Any:
    """Decoded uint8 frames, or their bfloat16 pixel values. Never touched, so they take no memory."""
    if kind == NATIVE:
        return np.empty((frames, HEIGHT, WIDTH, 3), np.uint8)
    return np.empty((frames, 3, HEIGHT, WIDTH), np.uint16)


def cuts(rows: int, arguments: int, prompts: int) -> Iterator[range]:
    size = rows // (arguments or prompts)
    return (range(start, start + size) for start in range(0, rows, size))


def table(step: Step, ref: MediaRef) -> None:
    rows = step.prompts * GENERATIONS
    one = rollout_pb2.GenerateRequest(media=[media_to_wire(ref)]).ByteSize()
    print(f"\n{step.name}: bytes for each boundary of a step")
    print(f"  {'boundary':20} {'none':>16} {'interned':>16} {'references':>12}   interned / references")
    totals = [0, 0, 0]
    for name, kind, arguments in BOUNDARIES:
        copies = [array(kind, step.frames) for _ in range(rows)]
        none = sum(pickled([copies[i] for i in cut]) for cut in cuts(rows, arguments, step.prompts))
        shared = Interned.repeat([array(kind, step.frames) for _ in range(step.prompts)], GENERATIONS)
        interned = sum(pickled(shared.slice(cut)) for cut in cuts(rows, arguments, step.prompts))
        sizes = [none, interned, rows * one]
        totals = [a + b for a, b in zip(totals, sizes, strict=True)]
        print(
            f"  {name:20} {none:>16,} {interned:>16,} {rows * one:>12,}   {interned / (rows * one):>12,.0f}"
        )
    print(
        f"  {'all':20} {totals[0]:>16,} {totals[1]:>16,} {totals[2]:>12,}   {totals[1] / totals[2]:>12,.0f}"
    )
    print(f"  bytes of references a sample: {one}")


def picture_file(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (HEIGHT // 16, WIDTH // 16, 3), np.uint8)
    out = io.BytesIO()
    Image.fromarray(pixels).resize((WIDTH, HEIGHT)).save(out, "JPEG", quality=90)
    return out.getvalue()


def clip_file(frames: int) -> bytes:
    import av

    out = io.BytesIO()
    wide = np.asarray(Image.open(io.BytesIO(picture_file(0))).resize((WIDTH + 8 * frames, HEIGHT)))
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("libx264", rate=8)
        stream.width, stream.height, stream.pix_fmt = WIDTH, HEIGHT, "yuv420p"
        for i in range(frames):
            pixels = np.ascontiguousarray(wide[:, 8 * i : 8 * i + WIDTH])
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, "rgb24")))
        container.mux(stream.encode())
    return out.getvalue()


async def moved(step: Step) -> MediaRef:
    """Have a service take the step's media, and two clients on its host read it for every sample."""
    with tempfile.TemporaryDirectory(prefix="omnifleet-dedup-") as name:
        folder = Path(name)
        config = MediaConfig(processors=(), shared_memory=folder / "shm")
        async with (
            media_service(config, folder, OPEN) as service,
            MediaClient.open(service.grpc) as environment,
            MediaClient.open(service.grpc) as worker,
            MediaClient.open(service.grpc) as trainer,
        ):
            refs = [await _put(environment, step, i) for i in range(step.prompts)]
            for reader in (worker, trainer):
                for ref in refs:
                    for _ in range(GENERATIONS):
                        await reader.frames(ref)
            counters = service.library.counters.snapshot()
            print(f"\n{step.name}: what the media service moved for the step")
            print(f"  uploaded (files as they are)      {counters['bytes_received']:>16,.0f}")
            print(
                f"  sources decoded                   {counters['decodes']:>16,.0f} of {step.prompts} uploads"
            )
            frames = {d for ref in refs for d in (await environment.info(ref)).frame_digests}
            print(f"  pixels stored, once on this host  {len(frames) * HEIGHT * WIDTH * 3:>16,}")
            print(f"  copied to readers (streamed)      {counters['bytes_streamed']:>16,.0f}")
            for who, reader in (("worker", worker), ("trainer", trainer)):
                logical = reader.payload.snapshot()["payload_bytes/client_frame/logical_media"]
                print(f"  handed to the {who:8} by map     {logical:>16,.0f}")
            return refs[0]


async def _put(client: MediaClient, step: Step, i: int) -> MediaRef:
    if step.frames == 1:
        return await client.put_image(picture_file(i % step.distinct), "bench")
    contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=step.frames)
    reply = await client.put(clip_file(step.frames), "bench", kind=MediaKind.VIDEO, contract=contract)
    return media_from_wire(reply.ref)


def main() -> None:
    for step in (
        Step(f"one clip of 32 frames x {GENERATIONS} generations", 1, 1, 32),
        Step(f"64 prompts, 8 pictures x {GENERATIONS} generations", 64, 8, 1),
    ):
        table(step, asyncio.run(moved(step)))


if __name__ == "__main__":
    main()
