"""A worker with a real vLLM engine that hears: a tiny Nemotron Omni with an encoder of sounds, a real media service, refits.

vLLM computes the encoder in bfloat16, whatever the engine's type; so does the reference, transformers' model, here.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.service import read_records
from omnifleet.sounds import read_sound_config, sound_brackets, sound_token_id, sound_tokens
from omnifleet.types import Generation, MediaKind, MediaRef, Sampling
from omnifleet.wire.codec import media_from_wire
from tests.integration.live_worker import WHO, Clients, Live, transfer_file
from tests.integration.sound_world import gap, reference, seen, tone

pytestmark = [pytest.mark.heavy, pytest.mark.soak, pytest.mark.timeout(600)]

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 1024,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "kv_cache_memory_bytes": 128 << 20,
    "enable_prefix_caching": False,
    "threads": 1,
    "processor_cache_gb": 0.05,
    "images_per_prompt": 1,
    "sounds_per_prompt": 2,
}
TOLERANCE = 1e-3


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    from safetensors.torch import load_file

    from omnifleet_trainer.tiny.hybrid import write_hybrid

    folder = tmp_path_factory.mktemp("hears")
    write_hybrid(folder / "model", sound=True)
    weights = load_file(folder / "model" / "model.safetensors")
    live = Live(folder / "run", folder / "model", weights)
    live.run_dir.mkdir()
    (live.run_dir / "recipe.yaml").write_text(yaml.safe_dump({"rollout": {"engine": SETTINGS}}))
    try:
        live.start("omnifleet_media", name="media")
        live.start("omnifleet_rollout", "--model", str(live.model), name="worker-0")
        yield live
    finally:
        live.close()


async def put(media: MediaClient, seconds: float, hertz: float) -> MediaRef:
    reply = await media.put(tone(seconds, hertz), "test", kind=MediaKind.AUDIO)
    return media_from_wire(reply.ref)


def asked(model: Path, sounds: int) -> list[int]:
    """One placeholder a sound."""
    return [40, *[sound_token_id(model), 41] * sounds, 42, 43, 44]


async def generate(on: Clients, refs: Sequence[MediaRef], **sampling: Any) -> Generation:
    reply = await on.rollout.generate(
        prompt_token_ids=asked(on.live.model, len(refs)),
        media=refs,
        sampling=Sampling(**sampling),
        identity=WHO,
        deadline_s=120,
    )
    assert not reply.failures, reply.failures
    return reply


async def test_logprobs_are_those_of_transformers_for_the_sound_that_was_sent(live: Live) -> None:
    """One second; and two sounds of which one is longer than the encoder sees at once."""
    drawn: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    async with live.clients() as on:
        high, low, long = [await put(on.media, *one) for one in ((1.0, 3000), (1.0, 300), (31.0, 700))]
        for refs in ([high], [low, long]):
            tracks = [await on.media.track(ref) for ref in refs]
            reply = await generate(on, refs, **drawn)
            sample = reply.samples[0]
            (before, after), token = sound_brackets(live.model), sound_token_id(live.model)
            config, expanded = read_sound_config(live.model), [40]
            for track in tracks:
                expanded += [*before, *[token] * sound_tokens(config, len(track)), *after, 41]
            assert reply.prompt_token_ids == [*expanded, 42, 43, 44]
            expected = reference(live.model, live.weights, tracks, reply.prompt_token_ids, sample.token_ids)
            print(f"\n{len(refs)} sounds: {gap(sample.logprobs, expected):.1e} nats from transformers")
            assert gap(sample.logprobs, expected) < TOLERANCE
        other = [await on.media.track(low)]
        one = (await generate(on, [high], **drawn)).samples[0]
        prompt = (await generate(on, [high], **drawn)).prompt_token_ids
        assert (
            gap(one.logprobs, reference(live.model, live.weights, other, prompt, one.token_ids))
            > 4 * TOLERANCE
        )


async def test_a_picture_is_seen_by_the_tower_in_bfloat16(live: Live) -> None:
    """Whatever the engine's type: float32 pixels would end it."""
    drawn: dict[str, Any] = {"max_tokens": 12, "seed": 3, "ignore_eos": True}
    async with live.clients() as on:
        red, blue = await on.picture("red"), await on.picture("blue", (64, 120))
        reply = await on.generate([red], **drawn)
        told = reply.prompt_token_ids, reply.samples[0].token_ids
        logprobs = reply.samples[0].logprobs
        expected = seen(live.model, live.weights, await on.tensors(red), *told)
        print(f"\na picture: {gap(logprobs, expected):.1e} nats from transformers")
        assert gap(logprobs, expected) < TOLERANCE
        other = (await on.generate([blue], **drawn)).samples[0]
        assert gap(other.logprobs, np.array(logprobs)) > 4 * TOLERANCE


async def test_a_repeated_sound_is_sent_and_encoded_once(live: Live) -> None:
    async with live.clients() as on:
        ref = await put(on.media, 0.7, 1234)
        before = [await on.counter(name) for name in ("encoder_items", "sounds_sent")]
        for seed in range(3):
            await generate(on, [ref], n=4, max_tokens=3, seed=seed, ignore_eos=True)
        after = [await on.counter(name) for name in ("encoder_items", "sounds_sent")]
        assert [now - then for now, then in zip(after, before, strict=True)] == [1, 1]


async def test_new_weights_hear_a_known_sound_anew(live: Live) -> None:
    """The encoder's output of the old weights is dropped; samples are not sent again."""
    import torch

    async with live.clients() as on:
        ref = await put(on.media, 1.0, 500)
        track = [await on.media.track(ref)]
        drawn: dict[str, Any] = {"max_tokens": 8, "seed": 1, "ignore_eos": True}
        await generate(on, [ref], **drawn)
        sent = await on.counter("sounds_sent")
        torch.manual_seed(1)
        weights = {
            name: t + 0.2 * torch.randn_like(t) if name.startswith("sound_") and t.ndim > 1 else t
            for name, t in live.weights.items()
        }
        old = live.weights
        with transfer_file() as shm:
            await on.refit_to(weights, shm)
        reply = await generate(on, [ref], **drawn)
        sample = reply.samples[0]
        told = reply.prompt_token_ids, sample.token_ids
        assert gap(sample.logprobs, reference(live.model, weights, track, *told)) < TOLERANCE
        assert gap(sample.logprobs, reference(live.model, old, track, *told)) > 4 * TOLERANCE
        assert await on.counter("sounds_sent") == sent


def test_a_sound_that_the_engine_forgot_is_sent_again(live: Live) -> None:
    """Once by vLLM's signal after the engine process alone forgot, once because its front end knows."""
    refs = asyncio.run(_two(live))
    command = [
        *(sys.executable, "-m", "tests.integration.engine_child", str(live.model), _media_address(live)),
        *(live.secret(Scope.SERVICE), "audio", str(sound_token_id(live.model))),
        *(ref.digest for ref in refs),
        json.dumps(SETTINGS),
    ]
    done = subprocess.run(
        command,
        capture_output=True,
        text=True,
        timeout=400,
        cwd=Path(__file__).resolve().parents[2],
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    said = {line["what"]: line for line in lines}
    sent = {what: line["counters"]["sounds_sent"] for what, line in said.items()}
    assert [sent[what] for what in ("first", "again", "after the engine forgot")] == [1, 1, 2]
    assert said["after the engine forgot"]["counters"]["media_resent"] == 1
    assert (
        sent["after both forgot"] == sent["once more"] + 1
        and sent["another picture"] == sent["after both forgot"] + 1
    )
    same = ("first", "again", "after the engine forgot", "once more", "after both forgot")
    assert len({tuple(said[what]["tokens"]) for what in same}) == 1


async def _two(live: Live) -> list[MediaRef]:
    async with live.clients() as on:
        return [await put(on.media, 1.0, 440), await put(on.media, 1.0, 4400)]


def _media_address(live: Live) -> str:
    return read_records(live.run_dir)["media"].grpc
