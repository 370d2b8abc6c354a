"""A worker with a real vLLM engine, a tiny random Qwen2-VL and a real media service: numerics, pictures, refits."""

import asyncio
import io
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import yaml
from PIL import Image

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.client.rollout import Done, RolloutClient, Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import image_token_id, read_image_processor
from omnifleet.service import load_tokens, read_records
from omnifleet.types import Generation, Identity, MediaRef, Sampling, WeightVersion
from omnifleet.wire import refit_pb2, refit_pb2_grpc
from omnifleet.wire.channel import open_channel
from omnifleet.wire.codec import version_from_wire, version_to_wire
from omnifleet.wire.errors import remote_errors
from omnifleet.wire.manifest import bucket_checksum

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(240)]

WHO = Identity(run="test")
TOLERANCE = 1e-3
ENGINE = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "kv_cache_memory_bytes": 64 << 20,
    "block_size": 32,
    "threads": 1,
    "processor_cache_gb": 0.05,
}


# ---------------------------------------------------------------- weights and their reference


def random_weights(table: Mapping[str, Any], seed: int) -> dict[str, Any]:
    """Fresh weights in the shapes of `table`, wide enough that logits differ visibly."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.randn(t.shape, generator=generator) * (0.15 if "visual" in name else 0.2)
        if t.ndim > 1
        else t
        for name, t in table.items()
    }


def make_checkpoint(out: Path, *, tied: bool) -> dict[str, Any]:
    """A tiny Qwen2-VL with wide random weights; returns them."""
    from safetensors.torch import load_file, save_file

    from omnifleet_trainer.tiny.checkpoint import write_checkpoint

    write_checkpoint(out, seed=0, tie_embeddings=tied)
    weights = random_weights(load_file(out / "model.safetensors"), seed=1)
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return weights


def hf_logprobs(
    model: Path,
    weights: Mapping[str, Any],
    prompt: Sequence[int],
    reply: Sequence[int],
    media: Sequence[Mapping[str, Any]] = (),
    temperature: float = 1.0,
) -> list[float]:
    """Logprobs of `reply` after the expanded `prompt` by transformers, the reference."""
    import torch
    from safetensors.torch import save_file
    from transformers import Qwen2VLForConditionalGeneration

    folder = model.parent / f"hf-{model.name}"
    folder.mkdir(exist_ok=True)
    for file in model.glob("*.json"):
        (folder / file.name).write_bytes(file.read_bytes())
    save_file(dict(weights), folder / "model.safetensors", metadata={"format": "pt"})
    hf = Qwen2VLForConditionalGeneration.from_pretrained(folder, dtype=torch.float32).eval()
    pictures = {
        name: torch.cat([torch.from_numpy(np.array(m[name])) for m in media])
        for name in (media[0] if media else ())
    }
    ids = torch.tensor([[*prompt, *reply]])
    types = (ids == image_token_id(model)).int()
    with torch.no_grad():
        logits = hf(input_ids=ids, mm_token_type_ids=types, **pictures).logits[0]
    rows = torch.log_softmax(logits[len(prompt) - 1 : -1] / temperature, dim=-1)
    return [float(row[token]) for row, token in zip(rows, reply, strict=True)]


def write_transfer(
    path: Path,
    weights: Mapping[str, Any],
    version: WeightVersion,
    parent: WeightVersion | None,
    changed: set[str],
) -> refit_pb2.Manifest:
    """One bucket with the changed tensors, float32."""
    manifest = refit_pb2.Manifest(
        version=version_to_wire(version),
        parent=version_to_wire(parent),
        checksum_algorithm="blake3",
        encoder_changed=True,
    )
    data = bytearray()
    for name, tensor in weights.items():
        entry = manifest.tensors.add(
            name=name, dtype="F32", shape=list(tensor.shape), changed=name in changed
        )
        entry.bytes = 4 * tensor.numel()
        if entry.changed:
            entry.offset = len(data)
            data += tensor.contiguous().numpy().tobytes()
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

    def start(self, module: str, *options: str, name: str) -> str:
        """Start `module`'s serve command; its gRPC address once it is ready."""
        code = f"from {module}.cli import app; app()"
        with (self.run_dir / f"{name}.log").open("wb") as out:
            process = subprocess.Popen(
                [sys.executable, "-c", code, "serve", "--run-dir", str(self.run_dir), *options],
                stderr=out,
                stdout=out,
            )
        self.processes.append(process)
        end = time.monotonic() + 120
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
            yield Clients(self, rollout, media, refit_pb2_grpc.RefitStub(channel))


@dataclass
class Clients:
    """Everything a test says to the living worker."""

    live: Live
    rollout: RolloutClient
    media: MediaClient
    refit: Any

    async def picture(self, colour: str, size: tuple[int, int] = (84, 56)) -> MediaRef:
        out = io.BytesIO()
        Image.new("RGB", size, colour).save(out, "PNG")
        return await self.media.put_image(out.getvalue(), "test")

    async def tensors(self, ref: MediaRef) -> Mapping[str, Any]:
        return (await self.media.segment(ref, read_image_processor(self.live.model), "test")).tensors

    async def generate(self, media: Sequence[MediaRef] = (), **sampling: Any) -> Generation:
        reply = await self.rollout.generate(
            prompt_token_ids=self.prompt(len(media)),
            media=media,
            sampling=Sampling(**sampling),
            identity=WHO,
            deadline_s=60,
        )
        assert not reply.failures, reply.failures
        return reply

    def prompt(self, pictures: int) -> list[int]:
        return [40, *[image_token_id(self.live.model), 41] * pictures, 42, 43, 44]

    async def stage(self, manifest: refit_pb2.Manifest, path: Path) -> str:
        request = refit_pb2.StageRequest(manifest=manifest, shm=refit_pb2.ShmTransport(path=str(path)))
        with remote_errors():
            return str((await self.refit.Stage(request, timeout=30)).manifest_digest)

    async def commit(self, digest: str, policy: int = refit_pb2.RECOMPUTE) -> refit_pb2.CommitReply:
        request = refit_pb2.CommitRequest(manifest_digest=digest, in_flight=policy, deadline_ms=20_000)
        with remote_errors():
            reply: refit_pb2.CommitReply = await self.refit.Commit(request, timeout=30)
        return reply

    async def refit_to(
        self, weights: dict[str, Any], shm: Path, policy: int = refit_pb2.RECOMPUTE
    ) -> refit_pb2.CommitReply:
        """A complete refit."""
        digest = await self.stage(self.manifest(weights, shm), shm)
        self.live.weights = weights
        return await self.commit(digest, policy)

    def manifest(
        self,
        weights: dict[str, Any],
        shm: Path,
        parent: WeightVersion | None = None,
        changed: set[str] | None = None,
    ) -> refit_pb2.Manifest:
        self.live.number += 1
        version = WeightVersion("test", "a", self.live.number)
        return write_transfer(shm, weights, version, parent, set(weights) if changed is None else changed)

    async def counter(self, name: str) -> float:
        status = await self.rollout.status()
        return next((c.value for c in status.counters if c.name == name), 0.0)

    async def check_against_hf(self, media: Sequence[MediaRef] = (), temperature: float = 1.0) -> None:
        """Sample under the current weights; each logprob equals that of transformers on `live.weights`."""
        reply = await self.generate(media, max_tokens=12, temperature=temperature, seed=3, ignore_eos=True)
        tensors = [await self.tensors(ref) for ref in media]
        sample = reply.samples[0]
        expected = hf_logprobs(
            self.live.model, self.live.weights, reply.prompt_token_ids, sample.token_ids, tensors, temperature
        )
        assert np.abs(np.array(expected) - np.array(sample.logprobs)).max() < TOLERANCE


def start_live(folder: Path, *, tied: bool) -> Live:
    model = folder / "model"
    live = Live(folder / "run", model, make_checkpoint(model, tied=tied))
    live.run_dir.mkdir()
    (live.run_dir / "recipe.yaml").write_text(yaml.safe_dump({"rollout": {"engine": ENGINE}}))
    try:
        live.start("omnifleet_media", name="media")
        live.start("omnifleet_rollout", "--model", str(model), name="worker-0")
    except BaseException:
        live.close()
        raise
    return live


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = start_live(tmp_path_factory.mktemp("untied"), tied=False)
    yield live
    live.close()
    assert [process.returncode for process in live.processes] == [0, 0]


@pytest.fixture
def shm() -> Iterator[Path]:
    path = Path(f"/dev/shm/omnifleet-test-{os.getpid()}")
    yield path
    path.unlink(missing_ok=True)


# ---------------------------------------------------------------- tests


async def test_logprobs_equal_transformers_with_and_without_a_picture(live: Live) -> None:
    async with live.clients() as on:
        await on.check_against_hf()
        await on.check_against_hf([await on.picture("red"), await on.picture("blue", (112, 112))])
        await on.check_against_hf([await on.picture("green")], temperature=0.7)


async def test_the_picture_changes_what_the_model_says(live: Live) -> None:
    async with live.clients() as on:
        scores = []
        for colour in ("red", "navy"):
            ref = await on.picture(colour)
            logprobs, _ = await on.rollout.score_tokens(on.prompt(1), [50, 51, 52], [ref])
            scores.append(logprobs)
        assert np.abs(np.array(scores[0]) - np.array(scores[1])).max() > 0.05


async def test_given_tokens_are_scored_as_they_were_sampled(live: Live) -> None:
    async with live.clients() as on:
        ref = await on.picture("orange")
        reply = await on.generate([ref], max_tokens=8, seed=1, ignore_eos=True)
        sample = reply.samples[0]
        scored, _ = await on.rollout.score_tokens(on.prompt(1), sample.token_ids, [ref])
        assert np.abs(np.array(scored) - np.array(sample.logprobs)).max() < TOLERANCE


async def test_a_repeated_picture_is_sent_and_encoded_once(live: Live) -> None:
    async with live.clients() as on:
        ref = await on.picture("purple", (140, 84))
        before = await on.counter("encoder_items"), await on.counter("pictures_sent")
        for seed in range(3):
            await on.generate([ref], n=4, max_tokens=3, seed=seed, ignore_eos=True)
        assert await on.counter("encoder_items") == before[0] + 1
        assert await on.counter("pictures_sent") == before[1] + 1


async def test_a_refit_equals_a_fresh_model_on_the_new_weights(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        picture = await on.picture("red")
        await on.check_against_hf([picture])
        await on.refit_to(random_weights(live.weights, 2), shm)
        await on.check_against_hf([picture])
        await on.check_against_hf()


async def test_half_of_a_fused_layer_can_change_alone(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        reply = await on.refit_to(random_weights(live.weights, 3), shm)
        name = next(n for n in live.weights if n.endswith("q_proj.weight"))
        weights = {**live.weights, name: live.weights[name] * 1.5}
        digest = await on.stage(on.manifest(weights, shm, version_from_wire(reply.version), {name}), shm)
        assert (await on.commit(digest)).tensors_loaded == 1
        live.weights = weights
        await on.check_against_hf([await on.picture("red")])


@pytest.mark.parametrize("policy", [refit_pb2.KEEP, refit_pb2.RECOMPUTE])
async def test_a_refit_during_a_reply_moves_its_version(live: Live, shm: Path, policy: int) -> None:
    async with live.clients() as on:
        digest = await on.stage(on.manifest(weights := random_weights(live.weights, 4 + policy), shm), shm)
        done, commit = None, None
        async for event in on.rollout.stream(
            prompt_token_ids=on.prompt(1),
            media=[await on.picture("red")],
            sampling=Sampling(max_tokens=600, ignore_eos=True),
            identity=WHO,
            deadline_s=60,
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(on.commit(digest, policy))
            if isinstance(event, Done):
                done = event
        assert commit is not None and (reply := await commit).in_flight == 1
        live.weights = weights
        assert done is not None and done.tokens > 0
        first, second = done.spans
        assert second.version == version_from_wire(reply.version) and first.version != second.version
        assert (first.start, first.end, second.end) == (0, second.start, done.tokens)
        assert await on.counter("span_mismatches") == 0
        await on.check_against_hf([await on.picture("red")])


async def test_what_is_not_whole_is_refused_and_the_old_weights_serve(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        manifest = on.manifest(random_weights(live.weights, 9), shm)
        damage(shm)
        with pytest.raises(OmnifleetError) as corrupt:
            await on.stage(manifest, shm)
        incomplete = on.manifest(random_weights(live.weights, 9), shm)
        del incomplete.tensors[3]
        with pytest.raises(OmnifleetError) as missing:
            await on.stage(incomplete, shm)
        assert {corrupt.value.reason, missing.value.reason} == {Reason.REFIT_REJECTED}
        assert "checksum" in corrupt.value.message and "missing 1" in missing.value.message
        await on.check_against_hf([await on.picture("red")])


async def test_a_prompt_that_is_too_long_is_refused(live: Live) -> None:
    async with live.clients() as on:
        with pytest.raises(OmnifleetError) as refused:
            await on.rollout.generate(
                prompt_token_ids=[5] * 2000, sampling=Sampling(), identity=WHO, deadline_s=20
            )
        assert refused.value.reason is Reason.PROMPT_TOO_LONG


async def test_tied_embeddings_are_refitted_and_a_kill_leaves_no_orphan(tmp_path: Path, shm: Path) -> None:
    live = start_live(tmp_path, tied=True)
    try:
        assert not any("lm_head" in name for name in live.weights)
        async with live.clients() as on:
            await on.check_against_hf()
            await on.refit_to(random_weights(live.weights, 2), shm)
            await on.check_against_hf()
            await on.check_against_hf([await on.picture("red")])
        worker = live.processes[-1]
        children = psutil.Process(worker.pid).children(recursive=True)
        assert children
        worker.kill()
        worker.wait()
        _, living = psutil.wait_procs(children, timeout=5)
        assert not living
    finally:
        live.close()
