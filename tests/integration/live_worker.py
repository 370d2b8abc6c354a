"""A worker with a real vLLM engine, a tiny random Qwen2-VL and a real media service, for tests; transformers as the reference."""

import io
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.client.rollout import RolloutClient
from omnifleet.client.turns import TurnsClient
from omnifleet.processor import (
    image_token_id,
    read_image_processor,
    read_video_processor,
    video_token_id,
)
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Generation, Identity, MediaKind, MediaRef, Sampling, WeightVersion
from omnifleet.wire import media_pb2, refit_pb2, refit_pb2_grpc, rollout_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import media_from_wire, version_to_wire
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.manifest import bucket_checksum

WHO = Identity(run="test")
TOLERANCE = 1e-3
ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "threads": 1,
    "processor_cache_gb": 0.05,
    "videos_per_prompt": 1,
}


# ---------------------------------------------------------------- weights and their reference


def random_weights(table: Mapping[str, Any], seed: int, scale: float = 1.0) -> dict[str, Any]:
    """Fresh weights in the shapes of `table`, wide enough that logits differ visibly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator) * scale * (0.15 if "visual" in name else 0.2)
        if t.ndim > 1
        else t
        for name, t in table.items()
    }


def make_checkpoint(
    out: Path, *, tied: bool, scale: float = 1.0, vocabulary: int | None = None
) -> dict[str, Any]:
    """A tiny Qwen2-VL with wide random weights; returns them. vocabulary: tokens it has, if not all of its tokenizer's."""
    from safetensors.torch import load_file, save_file

    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(out, seed=0, tie_embeddings=tied)
    table = load_file(out / "model.safetensors")
    if vocabulary is not None:
        cut = {n: t[:vocabulary].clone() for n, t in table.items() if "embed_tokens" in n or "lm_head" in n}
        table |= cut
        config = (out / "config.json").read_text()
        (out / "config.json").write_text(re.sub(r'("vocab_size": )\d+', rf"\g<1>{vocabulary}", config))
    weights = random_weights(table, seed=1, scale=scale)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return weights


class Scorer:
    """transformers in float32, the reference: scores tokens under any weights of `model`'s shapes."""

    def __init__(self, model: Path, folder: Path) -> None:
        self._model, self._folder = model, folder
        self._hf: Any = None

    def load(self, weights: Mapping[str, Any]) -> None:
        """Hold these weights from now on."""
        import torch
        from safetensors.torch import save_file
        from transformers import Qwen2VLForConditionalGeneration

        folder = self._folder / f"hf-{self._model.name}"
        folder.mkdir(exist_ok=True)
        for file in self._model.glob("*.json"):
            (folder / file.name).write_bytes(file.read_bytes())
        save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
        self._hf = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()

    def logprobs(
        self,
        prompt: Sequence[int],
        reply: Sequence[int],
        media: Sequence[Mapping[str, Any]] = (),
        temperature: float = 1.0,
    ) -> list[float]:
        """Logprobs of `reply` after the expanded `prompt`."""
        import torch

        tensors = {
            name: torch.cat([torch.from_numpy(np.array(m[name])) for m in media if name in m])
            for name in {name for m in media for name in m}
        }
        # The last token is never fed: it may be a placeholder that ended the reply, and has no features.
        ids = torch.tensor([[*prompt, *reply[:-1]]])
        types = (ids == image_token_id(self._model)).int() + 2 * (ids == video_token_id(self._model)).int()
        with torch.no_grad():
            logits = self._hf(input_ids=ids, mm_token_type_ids=types, **tensors).logits[0]
        rows = torch.log_softmax(logits[len(prompt) - 1 :] / temperature, dim=-1)
        return [float(row[token]) for row, token in zip(rows, reply, strict=True)]


def write_transfer(
    path: Path,
    weights: Mapping[str, Any],
    version: WeightVersion,
    parent: WeightVersion | None,
    changed: set[str],
    *,
    encoder_changed: bool = True,
) -> refit_pb2.Manifest:
    """One bucket with the changed tensors, float32 or whole numbers."""
    manifest = refit_pb2.Manifest(
        version=version_to_wire(version),
        parent=version_to_wire(parent),
        checksum_algorithm="blake3",
        encoder_changed=encoder_changed,
    )
    data = bytearray()
    for name, tensor in weights.items():
        dtype = "F32" if tensor.is_floating_point() else "I64"
        entry = manifest.tensors.add(
            name=name, dtype=dtype, shape=list(tensor.shape), changed=name in changed
        )
        entry.bytes = tensor.numel() * tensor.element_size()
        if entry.changed:
            entry.offset = len(data)
            raw = tensor.contiguous().numpy().tobytes()
            entry.digest = bucket_checksum(raw)
            data += raw
            data += bytes(-len(data) % 64)
    manifest.buckets.add(index=0, bytes=len(data), checksum=bucket_checksum(bytes(data)))
    path.write_bytes(data)
    return manifest


def damage(path: Path) -> None:
    """Flip one bit."""
    data = bytearray(path.read_bytes())
    data[1000] ^= 1
    path.write_bytes(data)


# ---------------------------------------------------------------- the living worker


@dataclass
class Live:
    """A media service and a worker as processes; `weights` are those that the worker should hold now."""

    run_dir: Path
    model: Path
    weights: dict[str, Any]
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)
    number: int = 0
    patience_s: float = 400.0

    def start(self, module: str, *options: str, name: str, before: str = "") -> str:
        """Start `module`'s serve command; its gRPC address once it is ready. before: statements that its process runs first."""
        code = f"{before}\nfrom {module}.cli import app; app()"
        with (self.run_dir / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", "--run-dir", str(self.run_dir), *options],
                stderr=out,
                stdout=out,
            )
        self.processes.append(process)
        end = time.monotonic() + self.patience_s
        while time.monotonic() < end and process.poll() is None:
            record = read_records(self.run_dir).get(name)
            if record is not None:
                return record.grpc
            time.sleep(0.05)
        raise AssertionError((self.run_dir / f"{name}.log").read_text()[-4000:])

    def close(self) -> None:
        for process in reversed(self.processes):
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()

    def secret(self, scope: Scope) -> str:
        return load_tokens(self.run_dir).secret(scope)

    @asynccontextmanager
    async def clients(self) -> AsyncIterator["Clients"]:
        records = read_records(self.run_dir)
        async with (
            RolloutClient.open(records["worker-0"].grpc, self.secret(Scope.TRAINER)) as rollout,
            MediaClient.open(records["media"].grpc, self.secret(Scope.SERVICE)) as media,
            open_channel(records["worker-0"].grpc, self.secret(Scope.TRAINER)) as channel,
        ):
            yield Clients(
                self,
                rollout,
                media,
                refit_pb2_grpc.RefitStub(channel),
                rollout_pb2_grpc.RolloutStub(channel),
                TurnsClient(channel),
            )


@dataclass
class Clients:
    """Everything a test says to the living worker."""

    live: Live
    rollout: RolloutClient
    media: MediaClient
    refit: Any
    raw: Any
    turns: TurnsClient

    async def picture(self, colour: str, size: tuple[int, int] = (84, 56)) -> MediaRef:
        out = io.BytesIO()
        Image.new("RGB", size, colour).save(out, "PNG")
        return await self.media.put_image(out.getvalue(), "test")

    async def clip(self, frames: int, size: tuple[int, int] = (64, 48)) -> MediaRef:
        """Every frame of a lossless clip (an animation: GPU machines may lack video encoders); frame i is grey 25 i."""
        contract = media_pb2.DecodeContract(sampling="uniform@1", num_frames=frames, temporal_patch=2)
        first, *rest = [Image.new("RGB", size, (25 * i,) * 3) for i in range(frames)]
        out = io.BytesIO()
        first.save(out, "PNG", save_all=True, append_images=rest, duration=100)
        reply = await self.media.put(out.getvalue(), "test", kind=MediaKind.VIDEO, contract=contract)
        return media_from_wire(reply.ref)

    async def tensors(self, ref: MediaRef) -> Mapping[str, Any]:
        read = read_video_processor if ref.kind is MediaKind.VIDEO else read_image_processor
        return (await self.media.segment(ref, read(self.live.model), "test")).tensors

    async def generate(self, media: Sequence[MediaRef] = (), **sampling: Any) -> Generation:
        reply = await self.rollout.generate(
            prompt_token_ids=self.prompt(media),
            media=media,
            sampling=Sampling(**sampling),
            identity=WHO,
            deadline_s=60,
        )
        assert not reply.failures, reply.failures
        return reply

    def prompt(self, media: Sequence[MediaRef] = ()) -> list[int]:
        """One placeholder an item, as a gateway sends it."""
        ids = [40]
        for ref in media:
            read = video_token_id if ref.kind is MediaKind.VIDEO else image_token_id
            ids += [read(self.live.model), 41]
        return [*ids, 42, 43, 44]

    async def stage(self, manifest: refit_pb2.Manifest, path: Path) -> str:
        request = refit_pb2.StageRequest(manifest=manifest, shm=refit_pb2.ShmTransport(path=str(path)))
        with remote_errors():
            return str((await self.refit.Stage(request, timeout=30)).manifest_digest)

    async def commit(self, digest: str, policy: int = refit_pb2.RECOMPUTE) -> refit_pb2.CommitReply:
        request = refit_pb2.CommitRequest(manifest_digest=digest, in_flight=policy, deadline_ms=20_000)
        with remote_errors():
            reply: refit_pb2.CommitReply = await self.refit.Commit(request, timeout=30)
        return reply

    async def fetched(self, version: Any) -> dict[str, bytes]:
        """All source tensors of the version that the worker serves, as a peer would fetch them."""
        with remote_errors():
            call = self.refit.Fetch(refit_pb2.FetchRequest(version=version), timeout=60)
            first, *rest = [part async for part in call]
        data, at, tensors = b"".join(part.data for part in rest), 0, {}
        for spec in first.manifest.tensors:
            tensors[spec.name] = data[at : at + spec.bytes]
            at += spec.bytes
        assert at == len(data)
        return tensors

    async def refit_to(
        self,
        weights: dict[str, Any],
        shm: Path,
        policy: int = refit_pb2.RECOMPUTE,
        *,
        encoder_changed: bool = True,
    ) -> refit_pb2.CommitReply:
        """A complete refit."""
        manifest = self.manifest(weights, shm, encoder_changed=encoder_changed)
        digest = await self.stage(manifest, shm)
        self.live.weights = weights
        return await self.commit(digest, policy)

    def manifest(
        self,
        weights: dict[str, Any],
        shm: Path,
        parent: WeightVersion | None = None,
        changed: set[str] | None = None,
        *,
        encoder_changed: bool = True,
    ) -> refit_pb2.Manifest:
        self.live.number += 1
        version = WeightVersion("test", "a", self.live.number)
        changed = set(weights) if changed is None else changed
        return write_transfer(shm, weights, version, parent, changed, encoder_changed=encoder_changed)

    async def counter(self, name: str) -> float:
        status = await self.rollout.status()
        return next((c.value for c in status.counters if c.name == name), 0.0)

    async def check_against_hf(self, media: Sequence[MediaRef] = (), temperature: float = 1.0) -> None:
        """Sample under the current weights; each logprob equals that of transformers on `live.weights`."""
        reply = await self.generate(media, max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
        tensors = [await self.tensors(ref) for ref in media]
        sample = reply.samples[0]
        scorer = Scorer(self.live.model, self.live.model.parent)
        scorer.load(self.live.weights)
        expected = scorer.logprobs(reply.prompt_token_ids, sample.token_ids, tensors, temperature)
        assert np.abs(np.array(expected) - np.array(sample.logprobs)).max() < TOLERANCE


def start_live(
    folder: Path,
    *,
    tied: bool,
    scale: float = 1.0,
    patience_s: float = 400.0,
    sleep_level: int | None = None,
    vocabulary: int | None = None,
    **engine: Any,
) -> Live:
    """A media service and a worker. engine: settings beside ENGINE. patience_s: how long each may take to come up.

    sleep_level: the deepest sleep that is asked of the engine. vocabulary: see `make_checkpoint`.
    """
    model = folder / "model"
    live = Live(folder / "run", model, make_checkpoint(model, tied=tied, scale=scale, vocabulary=vocabulary))
    live.patience_s = patience_s
    live.run_dir.mkdir()
    rollout = {"engine": {**ENGINE, **engine}, "sleep_level": sleep_level}
    (live.run_dir / "recipe.yaml").write_text(yaml.safe_dump({"rollout": rollout}))
    try:
        live.start("omnifleet_media", name="media")
        live.start("omnifleet_rollout", "--model", str(model), name="worker-0")
    except BaseException:
        live.close()
        raise
    return live


@contextmanager
def transfer_file() -> Iterator[Path]:
    """A place in shared memory for a transfer."""
    path = Path(f"/dev/shm/omnifleet-test-{os.getpid()}")
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)
