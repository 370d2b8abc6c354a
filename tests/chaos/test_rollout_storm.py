"""Refits without rest under load: every token of every reply is what the weights that its span names would have said.

A real engine on the CPU in float32, 64 requests at once, half of them with a picture, new weights (tower included) every two
seconds. Versions are drawn by a seed; transformers, holding the weights of a drawn version, scores the same tokens again.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from omnifleet.types import MediaRef, Sample, Sampling
from omnifleet.wire import refit_pb2
from tests.integration.live_worker import (
    WHO,
    Clients,
    Live,
    Scorer,
    random_weights,
    start_live,
    transfer_file,
)

pytestmark = [pytest.mark.heavy]

SEED = 20261130
REQUESTS = 64
EVERY_S = 2.0
SAME = 1e-4
CHECKED_PER_VERSION = 4


@dataclass
class Storm:
    """What happened: the weights of each version, and every reply with its prompt."""

    policy: int
    weights: dict[int, dict[str, Any]] = field(default_factory=dict)
    replies: list[tuple[list[int], Sequence[MediaRef], Sample]] = field(default_factory=list)
    in_flight: int = 0

    async def rage(self, on: Clients, shm: Path, seconds: float) -> None:
        """Refits and requests side by side for at least `seconds` and six versions."""
        over = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            pictures = [await on.picture(colour, (56, 56)) for colour in ("red", "navy", "green", "white")]
            for i in range(REQUESTS):
                media = [pictures[i % 4]] if i % 2 else []
                group.create_task(self._ask(on, media, i, over))
            end = time.monotonic() + seconds
            while time.monotonic() < end or len(self.weights) < 6:
                began = time.monotonic()
                await self._refit(on, shm)
                await asyncio.sleep(max(0.0, began + EVERY_S - time.monotonic()))
            over.set()

    async def _refit(self, on: Clients, shm: Path) -> None:
        weights = await asyncio.to_thread(random_weights, on.live.weights, 1000 + on.live.number)
        reply = await on.refit_to(weights, shm, self.policy)
        self.weights[on.live.number] = weights
        self.in_flight += reply.in_flight

    async def _ask(self, on: Clients, media: Sequence[MediaRef], lane: int, over: asyncio.Event) -> None:
        asked = 0
        while not over.is_set():
            asked += 1
            reply = await on.rollout.generate(
                prompt_token_ids=on.prompt(media),
                media=media,
                sampling=Sampling(max_tokens=64, seed=1000 * lane + asked, ignore_eos=True),
                identity=WHO,
                deadline_s=120,
            )
            assert not reply.failures, reply.failures
            self.replies.append((reply.prompt_token_ids, media, reply.samples[0]))

    def check_spans(self, first: int) -> None:
        """Each reply's spans cover its tokens without gaps, by versions that were committed, in their order."""
        for _, _, sample in self.replies:
            spans = sample.spans
            assert spans[0].start == 0 and spans[-1].end == len(sample.token_ids) == len(sample.logprobs)
            assert all(a.end == b.start and a.version.number < b.version.number for a, b in pairwise(spans))
            assert all(span.version.number in self.weights or span.version.number == first for span in spans)

    def of_version(self, number: int) -> list[tuple[list[int], Sequence[MediaRef], Sample]]:
        """Replies with tokens of a version: some that it began, some that it went on with."""
        began = [r for r in self.replies if r[2].spans[0].version.number == number]
        went_on = [r for r in self.replies if any(s.version.number == number for s in r[2].spans[1:])]
        return began[:CHECKED_PER_VERSION] + went_on[:CHECKED_PER_VERSION]


@dataclass
class Differences:
    """Largest differences of logprobs: in tokens before and after the first refit of their reply."""

    before: float = 0.0
    after: float = 0.0
    tokens_before: int = 0
    tokens_after: int = 0


async def rescore(storm: Storm, on: Clients, versions: Sequence[int], folder: Path) -> Differences:
    """Compare the tokens of drawn versions with transformers holding those weights."""
    found, scorer = Differences(), Scorer(on.live.model, folder)
    for number in versions:
        scorer.load(storm.weights[number])
        for prompt, media, sample in storm.of_version(number):
            tensors: list[Mapping[str, Any]] = [await on.tensors(ref) for ref in media]
            expected = scorer.logprobs(prompt, sample.token_ids, tensors)
            difference = np.abs(np.array(expected) - np.array(sample.logprobs))
            for k, span in enumerate(sample.spans):
                if span.version.number != number:
                    continue
                worst, count = float(difference[span.start : span.end].max()), span.end - span.start
                if k == 0:
                    found.before, found.tokens_before = max(found.before, worst), found.tokens_before + count
                else:
                    found.after, found.tokens_after = max(found.after, worst), found.tokens_after + count
    return found


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    live = start_live(tmp_path_factory.mktemp("storm"), tied=False, max_num_seqs=REQUESTS, max_model_len=256)
    yield live
    live.close()


async def run_storm(live: Live, policy: int, seconds: float, folder: Path, versions: int) -> Differences:
    async with live.clients() as on:
        first, storm = live.number, Storm(policy)
        with transfer_file() as shm:
            await storm.rage(on, shm, seconds)
        storm.check_spans(first)
        assert await on.counter("span_mismatches") == 0
        assert storm.in_flight > 0 and len(storm.replies) >= REQUESTS
        # The last version may have been committed after the last token.
        candidates = [n for n in storm.weights if storm.of_version(n)]
        drawn = random.Random(SEED).sample(candidates, min(versions, len(candidates)))
        found = await rescore(storm, on, drawn, folder)
        print(
            f"seed {SEED}: {len(storm.replies)} replies, {len(storm.weights)} versions, drawn {sorted(drawn)}; "
            f"largest difference {found.before:.1e} in {found.tokens_before} tokens before a refit within their reply, "
            f"{found.after:.1e} in {found.tokens_after} tokens after one"
        )
        assert found.tokens_before > 0 and found.tokens_after > 0
        return found


@pytest.mark.timeout(600)
async def test_under_recompute_every_token_is_of_the_weights_that_its_span_names(
    live: Live, tmp_path: Path
) -> None:
    found = await run_storm(live, refit_pb2.RECOMPUTE, 30, tmp_path, versions=3)
    assert max(found.before, found.after) < SAME


@pytest.mark.timeout(600)
async def test_under_keep_only_tokens_after_a_refit_differ_and_by_how_much(
    live: Live, tmp_path: Path, record_property: Any
) -> None:
    """Their KV is of older weights, as the policy says: the versions of their spans sampled them, but did not make all of it."""
    found = await run_storm(live, refit_pb2.KEEP, 6, tmp_path, versions=3)
    record_property("largest logprob difference under keep", found.after)
    assert found.before < SAME
    assert found.after > 100 * SAME


@pytest.mark.soak
@pytest.mark.timeout(1500)
async def test_five_minutes_of_refits(live: Live, tmp_path: Path) -> None:
    found = await run_storm(live, refit_pb2.RECOMPUTE, 300, tmp_path, versions=10)
    assert max(found.before, found.after) < SAME
