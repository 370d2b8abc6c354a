"""What a commit resets in vLLM, by policy, by what changed, by model and by release. The engine here notes its calls."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from omnifleet.config.services import RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import InFlight
from omnifleet_rollout.engine.vllm_compat import CHECKED
from omnifleet_rollout.engine.vllm_engine import VllmEngine
from omnifleet_rollout.engine.vllm_seams import LANGUAGE_IN_ENCODER


class Noting:
    """An AsyncLLM that does nothing but say what it was asked."""

    errored = False

    def __init__(self, *, resets: bool = True) -> None:
        self.calls: list[str] = []
        self._resets = resets

    async def collective_rpc(self, method: str, timeout: float, args: tuple[str, ...]) -> list[str]:
        self.calls.append(method)
        return [json.dumps({"ok": {"tensors": 3, "needs": "all"}})]

    async def reset_prefix_cache(self, *, reset_running_requests: bool) -> bool:
        self.calls.append(f"prefix, running {reset_running_requests}")
        return self._resets

    async def reset_encoder_cache(self) -> None:
        self.calls.append("encoder")

    async def update_weight_version(self, label: str) -> None:
        self.calls.append(f"label {label}")


def engine(checkpoint: Path, llm: Noting, *, release: str = "0.32.0", architecture: str = "") -> VllmEngine:
    async def nowhere() -> str:
        raise AssertionError("no media here")

    made = VllmEngine(checkpoint, RolloutConfig(), find_media=nowhere, secret="")
    made._llm, made._compat = llm, CHECKED[release]  # type: ignore[assignment]
    made._encoder_sees_language = architecture in LANGUAGE_IN_ENCODER
    return made


@pytest.mark.parametrize(
    ("policy", "encoder_changed", "architecture", "release", "expected"),
    [
        (InFlight.RECOMPUTE, True, "", "0.32.0", ["prefix, running True", "encoder", "label v"]),
        (InFlight.RECOMPUTE, False, "", "0.32.0", ["prefix, running True", "label v"]),
        (InFlight.DRAIN, False, "", "0.32.0", ["prefix, running True", "label v"]),
        (InFlight.KEEP, True, "", "0.32.0", ["encoder", "label v"]),
        (InFlight.KEEP, False, "", "0.25.1", []),
        (InFlight.KEEP, False, "NemotronH_Nano_Omni_Reasoning_V3", "0.25.1", ["encoder"]),
        (InFlight.RECOMPUTE, False, "NemotronH_Nano_VL_V2", "0.25.1", ["prefix, running True", "encoder"]),
    ],
)
async def test_a_commit_resets_what_depends_on_the_weights(
    random_checkpoint: Path,
    policy: InFlight,
    encoder_changed: bool,
    architecture: str,
    release: str,
    expected: list[str],
) -> None:
    llm = Noting()
    made = engine(random_checkpoint, llm, release=release, architecture=architecture)
    assert await made.commit("digest", "v", policy, encoder_changed=encoder_changed) == 3
    assert llm.calls == ["omni_commit", *expected]


async def test_kv_that_cannot_be_reset_fails_the_commit(random_checkpoint: Path) -> None:
    made = engine(random_checkpoint, Noting(resets=False))
    with pytest.raises(OmnifleetError) as failed:
        await made.commit("digest", "v", InFlight.RECOMPUTE, encoder_changed=False)
    assert failed.value.reason is Reason.ENGINE_ERROR and "old weights" in failed.value.message
