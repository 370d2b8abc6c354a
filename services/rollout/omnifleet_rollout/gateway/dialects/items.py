"""Items of the Responses dialect <-> chat messages. Pure: no media is fetched, nothing is tokenised."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from omnifleet.errors import invalid
from omnifleet_rollout.gateway.parts import TRAINING_FIELDS


def chat_messages(items: str | Sequence[Any], instructions: str | None) -> list[dict[str, Any]]:
    """The conversation that the items stand for.

    What the model said in one turn (reasoning, message, function calls, in this order) is one assistant message.
    Raises INVALID_REQUEST for items of other types.
    """
    messages: list[dict[str, Any]] = []
    if instructions:
        messages.append({"role": "system", "content": instructions})
    if isinstance(items, str):
        return [*messages, {"role": "user", "content": items}]
    turn: dict[str, Any] | None = None
    for i, item in enumerate(items):
        if not isinstance(item, Mapping):
            raise invalid(f"input[{i}] must be an object")
        if not _of_model(item):
            turn = None
            messages.append(_other(item, f"input[{i}]"))
            continue
        if turn is None or _begins_anew(turn, item):
            turn = {"role": "assistant", "content": None}
            messages.append(turn)
        _add(turn, item, f"input[{i}]")
    return messages


def chat_tools(tools: Sequence[Any] | None) -> list[Any]:
    """Function tools in chat form. Raises INVALID_REQUEST for tools that run on a server."""
    found = []
    for i, tool in enumerate(tools or ()):
        if not isinstance(tool, Mapping) or tool.get("type") != "function":
            kind = tool.get("type") if isinstance(tool, Mapping) else tool
            raise invalid(
                f"tools[{i}] of type {kind!r} cannot be honoured here: only functions of the client's own"
            )
        names = ("name", "description", "parameters")
        function = {name: tool[name] for name in names if tool.get(name) is not None}
        found.append({"type": "function", "function": function})
    return found


def _of_model(item: Mapping[str, Any]) -> bool:
    kind = item.get("type", "message")
    return kind in ("reasoning", "function_call") or (kind == "message" and item.get("role") == "assistant")


def _begins_anew(turn: Mapping[str, Any], item: Mapping[str, Any]) -> bool:
    """True if the item can't belong to the turn: turns say reasoning first, then one message, then calls."""
    kind = item.get("type", "message")
    said = turn["content"] is not None or "tool_calls" in turn
    return said if kind in ("reasoning", "message") else False


def _add(turn: dict[str, Any], item: Mapping[str, Any], where: str) -> None:
    match item.get("type", "message"):
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            turn["reasoning_content"] = "".join(str(part.get("text", "")) for part in parts)
        case "function_call":
            if not isinstance(item.get("name"), str) or not isinstance(item.get("arguments"), str):
                raise invalid(f"{where}: a function_call needs name and arguments")
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item.get("call_id") or "", "type": "function", "function": function}
            turn.setdefault("tool_calls", []).append(call)
        case "message":
            turn["content"] = item.get("content") or ""
    turn.update({name: item[name] for name in TRAINING_FIELDS if item.get(name) is not None})


def _other(item: Mapping[str, Any], where: str) -> dict[str, Any]:
    kind = item.get("type", "message")
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": item.get("call_id") or "",
            "content": item.get("output") or "",
        }
    if kind == "message" and item.get("role") in ("user", "system", "developer"):
        training = {name: item[name] for name in TRAINING_FIELDS if item.get(name) is not None}
        return {"role": item["role"], "content": item.get("content") or "", **training}
    raise invalid(
        f"{where} of type {kind!r} cannot be honoured here: allowed are message, reasoning, function_call and "
        "function_call_output"
    )
