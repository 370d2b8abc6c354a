"""An engine that ends in the middle of its work, killed or by what it was given: every request hears of it, and the worker goes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing
from pathlib import Path

import psutil
import pytest
import yaml

from omnifleet.client.rollout import Failed, Tokens
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.service import PASSING_EXIT
from omnifleet.types import Sampling
from tests.integration.live_worker import ENGINE, WHO, Clients, Live

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(900)]

SETTINGS = {
    **ENGINE,
    "kv_cache_memory_bytes": 128 << 20,
    "enable_prefix_caching": False,
    "images_per_prompt": 1,
    "videos_per_prompt": 0,
}
PIXELS_OF_ANOTHER_TYPE = """
import torch
from omnifleet_rollout.engine import vllm_nemotron as nemotron
right = nemotron.picture_inputs
nemotron.picture_inputs = lambda segment, tokens, dtype: right(segment, tokens, torch.float32)
"""
"""vLLM raises where it computes the first picture, inside the engine's process."""


@pytest.fixture
def live(tmp_path: Path) -> Iterator[Live]:
    from omnifleet_trainer.tiny.hybrid import write_hybrid

    write_hybrid(tmp_path / "model", sound=True)
    live = Live(tmp_path / "run", tmp_path / "model", {})
    live.run_dir.mkdir()
    (live.run_dir / "recipe.yaml").write_text(yaml.safe_dump({"rollout": {"engine": SETTINGS}}))
    try:
        live.start("omnifleet_media", name="media")
        options = ("--model", str(live.model))
        live.start("omnifleet_rollout", *options, name="worker-0", before=PIXELS_OF_ANOTHER_TYPE)
        yield live
    finally:
        live.close()


async def kill(on: Clients) -> None:
    """SIGKILL for the engine's process."""
    children = psutil.Process(on.live.processes[-1].pid).children()  # multiprocessing's own may be among them
    [core] = [child for child in children if "EngineCore" in " ".join(child.cmdline())]
    core.kill()


async def send_what_it_cannot_compute(on: Clients) -> None:
    ref = await on.picture("red")
    assert await reason_of(on.generate([ref], max_tokens=4)) is Reason.WORKER_LOST


async def reason_of(asked: Awaitable[object]) -> Reason:
    with pytest.raises((OmnifleetError, AssertionError)) as told:
        await asked
    error = told.value if isinstance(told.value, OmnifleetError) else told.value.args[0][0]
    assert isinstance(error, OmnifleetError) and error.retryable, error
    return error.reason


@pytest.mark.parametrize("end", [kill, send_what_it_cannot_compute])
async def test_every_request_ends_and_the_worker_asks_to_be_started_again(
    live: Live, end: Callable[[Clients], Awaitable[None]]
) -> None:
    async with live.clients() as on, asyncio.timeout(240):
        events = on.rollout.stream(
            prompt_token_ids=on.prompt(),
            sampling=Sampling(max_tokens=900, ignore_eos=True),
            identity=WHO,
            deadline_s=200,
        )
        heard, failed = 0, None
        async with aclosing(events):
            async for event in events:
                if isinstance(event, Tokens):
                    heard += 1
                    if heard == 1:
                        ending = asyncio.create_task(end(on))
                if isinstance(event, Failed):
                    failed = event.error
        await ending
        assert failed is not None and (failed.reason, failed.retryable) == (Reason.WORKER_LOST, True)
        status = await asyncio.to_thread(live.processes[-1].wait, 120)
    assert status == PASSING_EXIT
