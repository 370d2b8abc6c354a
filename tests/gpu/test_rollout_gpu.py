"""A worker asked directly on a GPU, where vLLM 0.25.1 has no weight labels and sends pixels each time.

Part of what `tests/integration/test_worker_vllm.py` checks on a CPU. With a gateway before it: `test_openai_gpu.py`.

Run: python -m pytest tests/gpu/test_rollout_gpu.py -m gpu -s    (one GPU; about four minutes, most of them one engine's start)

float16 on the device against transformers in float32 on the host: HALF is what separates them.
"""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.client.rollout import Done, Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.processor import image_token_id, video_token_id
from omnifleet.types import FinishReason, MediaRef, Sample, Sampling, VersionBound
from omnifleet.wire import refit_pb2
from omnifleet.wire.codec import version_from_wire
from tests.integration.live_worker import (
    WHO,
    Clients,
    Live,
    Scorer,
    random_weights,
    start_live,
)
from tests.integration.test_worker_vllm import (  # noqa: F401
    test_RPC_03_a_caller_that_goes_leaves_nothing_running_in_the_engine,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

HALF = 0.05
SCALE = 0.5
REQUESTS = 32


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    live = start_live(
        tmp_path_factory.mktemp("gpu"),
        tied=False,
        scale=SCALE,
        patience_s=500,
        dtype="float16",
        max_num_seqs=REQUESTS,
        kv_cache_memory_bytes=1 << 30,
        block_size=16,
        gpu_memory_utilization=0.3,
        threads=4,
    )
    yield live
    live.close()


def fresh(live: Live, seed: int) -> dict[str, Any]:
    return random_weights(live.weights, seed, SCALE)


async def differences(
    on: Clients, sample: Sample, prompt: list[int], media: list[MediaRef], **scoring: Any
) -> Any:
    """|engine - transformers| for each token, under the weights that the worker holds now."""
    scorer = Scorer(on.live.model, on.live.model.parent)
    scorer.load(on.live.weights)
    tensors = [await on.tensors(ref) for ref in media]
    return np.abs(np.array(scorer.logprobs(prompt, sample.token_ids, tensors, **scoring)) - sample.logprobs)


async def check(on: Clients, media: list[MediaRef], temperature: float = 1.0) -> float:
    reply = await on.generate(media, max_tokens=16, temperature=temperature, seed=3, ignore_eos=True)
    found = await differences(on, reply.samples[0], reply.prompt_token_ids, media, temperature=temperature)
    assert found.max() < HALF, found
    return float(found.max())


async def test_logprobs_equal_transformers_with_text_pictures_and_a_clip(live: Live) -> None:
    async with live.clients() as on:
        status = await on.rollout.status()
        print(f"\nengine {status.facts['engine']}, logprobs {status.facts['logprobs_mode']}")
        red, blue, clip = await on.picture("red"), await on.picture("blue", (112, 112)), await on.clip(4)
        for what, media in {
            "text": [],
            "pictures": [red, blue],
            "clip": [clip],
            "mixed": [red, clip],
        }.items():
            print(f"largest difference, {what}: {await check(on, media):.1e}")
        await check(on, [red], temperature=0.7)


async def test_a_repeated_picture_is_encoded_once(live: Live) -> None:
    async with live.clients() as on:
        ref = await on.picture("purple", (140, 84))
        before = await on.counter("encoder_items"), await on.counter("media_resent")
        for seed in range(2):
            await on.generate([ref], n=8, max_tokens=3, seed=seed, ignore_eos=True)
        assert await on.counter("encoder_items") == before[0] + 1
        assert await on.counter("media_resent") == before[1]


async def test_STL_01_a_repeated_picture_is_of_the_new_tower_after_a_refit(live: Live, shm: Path) -> None:
    async with live.clients() as on:
        picture = await on.picture("red")
        await check(on, [picture])
        first, _ = await on.rollout.score_tokens(on.prompt([picture]), [50, 51, 52], [picture])
        changed = {n: t * 1.3 if "visual" in n else t for n, t in live.weights.items()}
        await on.refit_to(changed, shm)
        again, _ = await on.rollout.score_tokens(on.prompt([picture]), [50, 51, 52], [picture])
        await check(on, [picture])
        print(f"\nthe new tower moved the scores by {np.abs(np.array(first) - again).max():.2f}")


@pytest.mark.parametrize("policy", [refit_pb2.KEEP, refit_pb2.RECOMPUTE])
async def test_a_refit_during_a_reply_moves_its_version(live: Live, shm: Path, policy: int) -> None:
    async with live.clients() as on:
        digest = await on.stage(on.manifest(weights := fresh(live, 40 + policy), shm), shm)
        done, commit = None, None
        picture = await on.picture("red")
        async for event in on.rollout.stream(
            prompt_token_ids=on.prompt([picture]),
            media=[picture],
            sampling=Sampling(
                max_tokens=900,
                ignore_eos=True,
                banned_token_ids=(image_token_id(live.model), video_token_id(live.model)),
            ),
            identity=WHO,
            deadline_s=120,
        ):
            if isinstance(event, Tokens) and commit is None:
                commit = asyncio.create_task(on.commit(digest, policy))
            if isinstance(event, Done):
                done = event
        assert commit is not None and (reply := await commit).in_flight == 1
        live.weights = weights
        assert done is not None
        first, second = done.spans
        assert second.version == version_from_wire(reply.version) != first.version
        assert (first.start, first.end, second.end) == (0, second.start, done.tokens)
        await check(on, [picture])


async def test_a_prefix_cached_under_old_weights_is_not_reused_after_a_refit_that_keeps_kv(
    live: Live, shm: Path
) -> None:
    prompt = [50 + 7 * i % 140 for i in range(100)]
    async with live.clients() as on:

        async def ask() -> bool:
            """Whether KV of the prompt was there already; its logprobs are those of the weights of now."""
            reply = await on.rollout.generate(
                prompt_token_ids=prompt,
                sampling=Sampling(max_tokens=12, seed=5, ignore_eos=True),
                identity=WHO,
                deadline_s=60,
            )
            sample = reply.samples[0]
            assert (await differences(on, sample, prompt, [])).max() < HALF
            return sample.cached_prompt_tokens > 0

        assert [await ask(), await ask()] == [False, True]
        await on.refit_to(fresh(live, 50), shm, refit_pb2.KEEP)
        assert [await ask(), await ask()] == [False, True]


async def test_under_refits_every_token_is_of_the_weights_that_its_span_names(live: Live, shm: Path) -> None:
    """The storm in short: here spans are ours alone, and a token counted for the wrong weights would score far off."""
    async with live.clients() as on:
        picture = await on.picture("navy")
        weights: dict[int, dict[str, Any]] = {}
        replies: list[tuple[list[int], list[MediaRef], Sample]] = []
        over = asyncio.Event()

        async def lane(number: int) -> None:
            media = [picture] if number % 2 else []
            while not over.is_set():
                reply = await on.generate(media, max_tokens=200, seed=number, ignore_eos=True)
                replies.append((reply.prompt_token_ids, media, reply.samples[0]))

        async with asyncio.TaskGroup() as group:
            for number in range(REQUESTS):
                group.create_task(lane(number))
            for seed in range(5):
                made = await asyncio.to_thread(fresh, live, 60 + seed)
                await on.refit_to(made, shm)
                weights[live.number] = made
                await asyncio.sleep(1.0)
            over.set()
        moved = [r for r in replies if len(r[2].spans) > 1]
        assert moved and all(a.end == b.start for _, _, sample in replies for a, b in pairwise(sample.spans))
        scorer, worst = Scorer(live.model, live.model.parent), 0.0
        for prompt, media, sample in random.Random(0).sample(moved, min(6, len(moved))):
            tensors = [await on.tensors(ref) for ref in media]
            for span in sample.spans:
                if span.version.number in weights:
                    scorer.load(weights[span.version.number])
                    expected = np.array(scorer.logprobs(prompt, sample.token_ids, tensors))
                    found = np.abs(expected - sample.logprobs)[span.start : span.end]
                    worst = max(worst, float(found.max()))
        print(f"\n{len(replies)} replies, {len(moved)} across refits; largest difference {worst:.1e}")
        assert worst < HALF


async def test_an_exact_version_is_kept_or_refused(live: Live) -> None:
    async with live.clients() as on:
        reply = await on.generate(max_tokens=2)
        version = reply.samples[0].spans[0].version
        again = await on.rollout.generate(
            prompt_token_ids=on.prompt(),
            sampling=Sampling(max_tokens=2),
            identity=WHO,
            bound=VersionBound(exact=version),
            deadline_s=60,
        )
        assert not again.failures
        newer = type(version)(version.run, version.lineage, version.number + 1)
        with pytest.raises(OmnifleetError) as refused:
            await on.rollout.generate(
                prompt_token_ids=on.prompt(),
                sampling=Sampling(max_tokens=2),
                identity=WHO,
                bound=VersionBound(min=newer),
                deadline_s=60,
            )
        assert refused.value.reason is Reason.VERSION_TOO_OLD and refused.value.retryable


async def test_PLC_placeholders_are_counted_and_never_written(live: Live) -> None:
    async with live.clients() as on:
        picture, image = await on.picture("red"), image_token_id(live.model)
        for ids in ([40, image, image, 41], [40, *[image] * 6, 41], [40, video_token_id(live.model), 41]):
            with pytest.raises(OmnifleetError) as refused:
                await on.rollout.generate(
                    prompt_token_ids=ids, media=[picture], sampling=Sampling(), identity=WHO, deadline_s=60
                )
            assert refused.value.reason is Reason.INVALID_REQUEST
        banned = tuple(t for t in range(live.weights["lm_head.weight"].shape[0]) if t != image)
        reply = await on.generate([picture], max_tokens=8, banned_token_ids=banned, ignore_eos=True)
        assert reply.samples[0].token_ids == [image]
        assert reply.samples[0].finish_reason is FinishReason.STOP
