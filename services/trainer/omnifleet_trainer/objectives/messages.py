"""Faulty messages and what they cost. Source: NeMo RL's message-level penalties: they overwrite the message's span.

A message is one turn that the model wrote. Its tokens get the fault's advantage in place of the sample's.
"""

from __future__ import annotations

import json
import re
from enum import StrEnum

from omnifleet.config.objective import MessagePenalties

_TOOL_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|$)", re.DOTALL)
_THINK_TAG = re.compile(r"</?think>")


class Fault(StrEnum):
    """What is wrong with a message."""

    INVALID_TOOL_CALL = "invalid_tool_call"
    MALFORMED_THINKING = "malformed_thinking"


def fault_of(text: str, *, opened: bool = False) -> Fault | None:
    """The fault of a message, or None. opened: the chat template ended with an opening think tag.

    invalid_tool_call: a <tool_call> block that is not closed, or no JSON object with a `name`. malformed_thinking:
    think tags other than none, or one pair in order. The first wins.
    """
    if not all(end and _is_call(body) for body, end in _TOOL_CALL.findall(text)):
        return Fault.INVALID_TOOL_CALL
    tags = ["<think>"] * opened + _THINK_TAG.findall(text)
    return None if tags in ([], ["<think>", "</think>"]) else Fault.MALFORMED_THINKING


def penalty_of(fault: Fault | None, penalties: MessagePenalties) -> float | None:
    """The advantage that a fault's tokens get; None if they keep their sample's."""
    match fault:
        case Fault.INVALID_TOOL_CALL:
            return penalties.invalid_tool_call
        case Fault.MALFORMED_THINKING:
            return penalties.malformed_thinking
        case None:
            return None


def _is_call(body: str) -> bool:
    try:
        call = json.loads(body)
    except ValueError:
        return False
    return isinstance(call, dict) and isinstance(call.get("name"), str)
