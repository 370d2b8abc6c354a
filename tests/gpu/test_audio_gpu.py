"""Sounds on a GPU: the official `openai` client, gateway, media service and a worker with vLLM; the tests of the CPU, every one.

Run: python -m pytest tests/gpu/test_audio_gpu.py -m gpu -s    (one GPU; most of the time is one engine's start)

Needs the `openai` package, which vLLM brings, and TorchCodec with an FFmpeg. bfloat16 against transformers in float32 on the host.
"""

from __future__ import annotations

import os

import pytest

from tests.integration.test_openai_client import Device
from tests.integration.test_openai_sounds import (  # noqa: F401
    hearing,
    test_a_sound_changes_the_reply_and_is_what_transformers_hears,
    test_pictures_and_sounds_share_a_prompt_in_chat_and_responses,
    test_what_is_no_sound_and_what_does_not_fit_is_refused,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

GPU = Device(
    {
        "dtype": "bfloat16",
        "kv_cache_memory_bytes": 256 << 20,
        "gpu_memory_utilization": 0.3,
        "threads": 4,
        "arguments": {"skip_mm_profiling": True},
    },
    tolerance=0.1,
)


@pytest.fixture(scope="module")
def device() -> Device:
    """What `hearing` starts its engine with here."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return GPU
