"""Routed experts and sampling masks, from fake engines through worker and gateway: complete with each sample, or refused."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from safetensors.numpy import load

from omnifleet.auth import Scope
from omnifleet.client.fleet import FleetClient, WorkerView
from omnifleet.client.rollout import Failed
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Sample, Sampling, WorkerState
from omnifleet_rollout.engine.fake import FakeEngine, fake_token
from omnifleet_rollout.gateway.renderer import RendererLoader
from omnifleet_rollout.worker import generation
from tests.contract.gateway_world import PROMPT, WHO, World, until, world, write_tokenizer
from tests.contract.test_worker_generate import running

BOTH = ("routed_experts", "sampling_mask")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("checkpoint"))


@asynccontextmanager
async def joined(here: World, id: str, engine: FakeEngine) -> AsyncIterator[FakeEngine]:
    """A real worker around a fake engine, as a member of the fleet."""
    async with running(engine) as (_, address):
        view = WorkerView(
            id=id,
            instance=id,
            grpc_address=address,
            model="fake",
            state=WorkerState.CATCHING_UP,
            max_running=8,
        )
        async with FleetClient.open(here.address, here.tokens.secret(Scope.SERVICE)) as fleet:
            await fleet.join(view)
        yield engine


def check_whole(sample: Sample, tokens: int) -> None:
    """Both extras cover the sample from its first token on."""
    experts = load(sample.routed_experts)["routed_experts"]
    mask = load(sample.sampling_mask)
    assert experts.shape[0] == len(PROMPT) + tokens - 1
    assert len(mask["lengths"]) == tokens == len(sample.token_ids) and mask["start"].tolist() == [0]


def asking(here: World, tokens: int, **more: Any) -> asyncio.Task[Any]:
    sampling = Sampling(max_tokens=tokens, seed=3, ignore_eos=True)
    return asyncio.create_task(
        here.client.generate(prompt_token_ids=PROMPT, sampling=sampling, identity=WHO, deadline_s=60, **more)
    )


async def test_both_reach_the_caller_through_the_gateway(tmp_path: Path) -> None:
    async with world(tmp_path) as here, joined(here, "w-1", FakeEngine(experts=4, masks=True)):
        check_whole((await asking(here, 5, extras=BOTH)).samples[0], 5)
        check_whole((await asking(here, 5)).samples[0], 5)


@pytest.mark.parametrize(
    ("name", "reason", "knob"),
    [
        ("sampling_mask", Reason.UNSUPPORTED, "rollout.engine.return_sampling_mask"),
        ("attention_maps", Reason.INVALID_REQUEST, ""),
    ],
)
async def test_what_the_engine_has_not_is_refused_before_a_token(
    tmp_path: Path, name: str, reason: Reason, knob: str
) -> None:
    async with world(tmp_path) as here, joined(here, "w-1", FakeEngine(experts=4)):
        with pytest.raises(OmnifleetError) as refused:
            await asking(here, 5, extras=(name,))
        assert (refused.value.reason, refused.value.knob, refused.value.retryable) == (reason, knob, False)
        assert here.gateway.counters.count("tokens") == 0


async def test_a_sample_that_lost_its_worker_begins_again_and_lacks_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "WHOLE_PACE_S", 0.01)
    async with world(tmp_path) as here:
        async with joined(here, "w-1", FakeEngine(token_s=0.02, experts=4, masks=True)) as first:
            task = asking(here, 200)
            await until(lambda: here.gateway.counters.count("tokens") > 3)
            async with joined(here, "w-2", FakeEngine(experts=4, masks=True)):
                first.crash()
                sample = (await task).samples[0]
        check_whole(sample, 200)
        assert sample.token_ids == [fake_token(PROMPT, 3, k) for k in range(200)]
        assert sample.spans[0].start == 0 and len({span.worker for span in sample.spans}) == 1
        assert here.gateway.counters.count("begun_again") == 1
        assert here.gateway.counters.count("continuations") == 0


async def test_tokens_that_were_shown_cannot_be_taken_back(tmp_path: Path) -> None:
    async with world(tmp_path) as here:
        async with joined(here, "w-1", FakeEngine(token_s=0.02, experts=4)) as only:
            events = []
            async for event in here.client.stream(
                prompt_token_ids=PROMPT,
                sampling=Sampling(max_tokens=200, ignore_eos=True),
                identity=WHO,
                extras=("routed_experts",),
                deadline_s=60,
            ):
                events.append(event)
                if len(events) == 3:
                    only.crash()
        last = events[-1]
        assert isinstance(last, Failed) and isinstance(last.error, OmnifleetError)
        assert last.error.reason is Reason.WORKER_LOST and last.error.retryable
        assert "routed_experts" in last.error.message


async def test_environments_get_them_in_base64(tmp_path: Path, checkpoint: Path) -> None:
    engine = FakeEngine(experts=4, masks=True)
    async with world(tmp_path, renderer=RendererLoader(checkpoint)) as here, joined(here, "w-1", engine):
        async with httpx.AsyncClient(base_url=f"{here.http}/v1", timeout=60) as http:
            body = {"prompt": PROMPT, "max_tokens": 4, "seed": 3, "ignore_eos": True}
            wanted = {"return_routed_experts": True, "return_sampling_mask": True}
            block = (await http.post("/completions", json={**body, **wanted})).json()["choices"][0][
                "omnifleet"
            ]
            assert load(base64.b64decode(block["routed_experts"]))["routed_experts"].shape == (6, 1, 1)
            assert load(base64.b64decode(block["sampling_mask"]))["lengths"].size == 4
            plain = (await http.post("/completions", json=body)).json()["choices"][0]["omnifleet"]
            assert "routed_experts" not in plain
            chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4, "ignore_eos": True}
            message = (await http.post("/chat/completions", json={**chat, **wanted})).json()["choices"][0][
                "message"
            ]
            assert load(base64.b64decode(message["routed_experts"]))["routed_experts"].ndim == 3


async def test_extras_that_fit_into_no_message_fail_their_sample(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(generation, "_LARGEST", 200)
    async with world(tmp_path) as here, joined(here, "w-1", FakeEngine(experts=4)):
        reply = await asking(here, 300)
        error = reply.failures[0]
        assert isinstance(error, OmnifleetError) and error.reason is Reason.LIMIT_EXCEEDED
        assert error.knob == "rollout.engine.max_model_len"
