"""What a completions body may ask with: one text or list of ids, or a list of these."""

from __future__ import annotations

from typing import Any

import pytest

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.gateway.dialects.completions import _prompts


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("x", ["x"]),
        ([5, 0, 2**32 - 1], [[5, 0, 2**32 - 1]]),
        (["x", "y"], ["x", "y"]),
        ([[5], "x"], [[5], "x"]),
    ],
)
def test_a_prompt_is_a_text_or_ids(prompt: Any, prompts: list[Any]) -> None:
    assert _prompts(prompt) == prompts


@pytest.mark.parametrize(
    "prompt", [None, "", [], [[]], [True], [1, -1], [1, 2**32], [1.0], [5, "x"], [[5, None]]]
)
def test_other_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(OmnifleetError) as refused:
        _prompts(prompt)
    assert refused.value.reason is Reason.INVALID_REQUEST
