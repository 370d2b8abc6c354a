"""No wait on vLLM's processes is without an end. The engine here is a stub that never answers."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet_rollout.engine import vllm_engine
from omnifleet_rollout.engine.vllm_compat import CHECKED
from omnifleet_rollout.engine.vllm_engine import VllmEngine


class Silent:
    """Every call waits for ever."""

    errored = False
    output_handler = None

    def __getattr__(self, name: str) -> Any:
        async def wait(*args: Any, **kwargs: Any) -> None:
            await asyncio.Event().wait()

        return wait

    def shutdown(self, timeout_s: float) -> None:
        pass


@pytest.fixture
def engine(random_checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> VllmEngine:
    async def nowhere() -> str:
        raise AssertionError("no media here")

    made = VllmEngine(random_checkpoint, RolloutConfig(), find_media=nowhere, secret="")
    made._llm, made._compat = Silent(), CHECKED["0.32.0"]
    made._encoder_sees_language = False
    monkeypatch.setattr(vllm_engine, "_PAUSE_S", 0.01)
    monkeypatch.setattr(vllm_engine, "_RPC_S", 0.01)
    return made


@pytest.mark.parametrize("step", ["pause", "resume", "drop_stage"])
async def test_a_silent_engine_is_a_typed_error(engine: VllmEngine, step: str) -> None:
    with pytest.raises(OmnifleetError) as failed:
        await asyncio.wait_for(getattr(engine, step)(), 120)
    assert failed.value.reason is Reason.ENGINE_ERROR and "within" in failed.value.message


async def test_an_engine_that_does_not_commit_fails_the_refit(engine: VllmEngine) -> None:
    with pytest.raises(OmnifleetError) as failed:
        await asyncio.wait_for(engine.commit("d", "v", InFlight.RECOMPUTE, encoder_changed=True), 120)
    assert failed.value.reason is Reason.ENGINE_ERROR


async def test_an_engine_that_does_not_resume_is_given_up(engine: VllmEngine) -> None:
    assert engine.alive()
    with pytest.raises(OmnifleetError):
        await engine.resume()
    assert not engine.alive()
