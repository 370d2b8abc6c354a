"""The official `openai` client against gateway, media service and a worker with vLLM on a GPU: the tests of the CPU, every one.

Run: python -m pytest tests/gpu/test_openai_gpu.py -m gpu -s    (one GPU; three minutes, most of them one engine's start)

Needs the `openai` package, which vLLM brings. float16: two passes over the same tokens differ by its rounding.
"""

from __future__ import annotations

import os

import pytest

from tests.integration.test_openai_client import (  # noqa: F401
    Device,
    stack,
    test_every_dialect_says_the_same_whole_streamed_sync_and_async,
    test_pictures_and_clips_change_the_reply_and_their_tokens_are_scored_as_sampled,
    test_stop_strings_tools_and_versions_meet_a_real_engine,
    test_the_context_caps_the_reply_and_refuses_a_prompt_that_does_not_fit,
    test_thirty_turns_with_pictures_keep_one_growing_exact_token_prefix,
    test_tool_calls_and_reasoning_through_vllms_own_parsers,
)

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

GPU = Device(
    {
        "dtype": "float16",
        "kv_cache_memory_bytes": 1 << 30,
        "block_size": 16,
        "gpu_memory_utilization": 0.3,
        "threads": 4,
    },
    tolerance=0.02,
)


@pytest.fixture(scope="module")
def device() -> Device:
    """What `stack` starts its engine with here."""
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    return GPU
