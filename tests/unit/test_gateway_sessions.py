"""Sessions on disk, session keys, budgets, what tools' arguments looked like, and items as messages."""

from __future__ import annotations

import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Digest, Identity, MediaKind, MediaRef
from omnifleet_rollout.gateway.budget import Budgets
from omnifleet_rollout.gateway.dialects.items import chat_messages
from omnifleet_rollout.gateway.dialects.reply import shortest
from omnifleet_rollout.gateway.parsing import verbatim
from omnifleet_rollout.gateway.parts import Plain
from omnifleet_rollout.gateway.session_key import SessionKeys, merged
from omnifleet_rollout.gateway.sessions import Sessions
from omnifleet_rollout.gateway.turns import History, Turn, message_digest, token_array

WHO = Identity("r", "env", "s", "e1")
PICTURE = MediaRef(MediaKind.IMAGE, Digest("ab" * 32))


def turn(key: str, parent: str = "") -> Turn:
    return Turn(key, parent, ("m", key), token_array([1, 70_000]), token_array([2, 3]), (PICTURE,))


def test_turns_and_homes_are_there_after_a_restart_and_the_oldest_go_first(tmp_path: Path) -> None:
    path = tmp_path / "sessions.sqlite"
    first = Sessions(path, keep=2)
    first.record(WHO, turn("a"))
    first.record(WHO, turn("b", "a"))
    first.stick("r", "s", "w-1")
    again = Sessions(path, keep=2)  # the first was never closed: as after kill -9
    assert again.memory("r", "s").turns == {"a": turn("a"), "b": turn("b", "a")}
    assert [t.key for t in again.memory("r", "s").chain("b")] == ["a", "b"]
    assert again.home("r", "s") == "w-1" and again.home("r", "other") == ""
    for name in ("t", "u"):
        again.stick("r", name, "w-2")
    third = Sessions(path, keep=2)
    assert len(third) == 2 and not third.memory("r", "s").turns and third.home("r", "u") == "w-2"
    for sessions in (first, again, third):
        sessions.close()


def test_a_session_key_says_who_and_nothing_else_may_be_said() -> None:
    keys = SessionKeys("secret")
    key = keys.mint(WHO, time.time() + 60)
    assert keys.read(key) == WHO
    assert merged(Identity("default", session=key), WHO) == WHO
    with pytest.raises(OmnifleetError) as caught:
        merged(Identity("other run"), WHO)
    assert caught.value.reason is Reason.FORBIDDEN
    body, mac = key.rsplit(".", 1)
    broken = [f"{body}x.{mac}", f"{body}.{mac[:-2]}AA", "ofs.", "ofs.!.!", keys.mint(WHO, time.time() - 1)]
    for bad in broken:
        with pytest.raises(OmnifleetError) as caught:
            keys.read(bad)
        assert caught.value.reason is Reason.UNAUTHENTICATED
    with pytest.raises(OmnifleetError):
        SessionKeys("another").read(key)


def test_a_budget_is_used_up_refilled_and_says_when_to_come_back() -> None:
    budgets = Budgets()
    budgets.take("r", 10_000, 0.0)  # a run without a budget is not limited
    assert budgets.set("r", 4, 10.0) == 0
    budgets.take("r", 3, 11.0)
    with pytest.raises(OmnifleetError) as caught:
        budgets.take("r", 2, 11.0)
    assert caught.value.reason is Reason.OVERLOADED and caught.value.knob == "trainer.max_staleness"
    budgets.give_back("r", 1)
    budgets.take("r", 2, 11.0)
    assert budgets.set("r", 1, 18.0) == 0
    with pytest.raises(OmnifleetError) as caught:
        budgets.take("r", 2, 20.0)
    assert caught.value.retry_after_ms == 6000  # the last budget stood for 8 s, 2 s ago
    budgets.take("other", 5, 20.0)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


@given(st.lists(st.dictionaries(st.text(max_size=3), json_values, max_size=3), max_size=3), st.integers(0, 4))
def test_arguments_are_found_as_they_stand_in_the_text(values: list[dict[str, object]], indent: int) -> None:
    import json

    texts = [json.dumps(value, indent=indent, ensure_ascii=False) for value in values]
    said = "so {".join(["", *(f'{{"name": "f", "arguments": {text}}}' for text in texts)])
    parsed = [json.dumps(value, sort_keys=True) for value in values]
    found = verbatim(said, parsed)
    assert [json.loads(text) for text in found] == values
    assert all(text in said for text in found)


def test_arguments_that_do_not_stand_in_the_text_are_the_parsers() -> None:
    assert verbatim("<x>1</x>", ['{"a": 1}']) == ['{"a": 1}']
    assert verbatim('{"a": 1} {"b": 2}', ['{"b":2}', "broken"]) == ['{"b": 2}', "broken"]


@given(st.lists(st.floats(-200, 0, width=32), max_size=8))
def test_logprobs_are_written_with_the_fewest_digits_of_the_same_float32(logprobs: list[float]) -> None:
    short = shortest(logprobs)
    assert np.array_equal(np.float32(short), np.float32(logprobs))
    assert all(len(repr(a)) <= len(repr(b)) for a, b in zip(short, logprobs, strict=True))


def test_a_message_is_the_same_in_every_form_that_clients_send() -> None:
    def digest(**body: object) -> str:
        return str(message_digest(Plain({"role": "assistant", **body})))

    part = {"type": "text", "text": "hi"}
    assert (
        digest(content="hi")
        == digest(content=[part])
        == digest(content="hi", reasoning_content="hm", name="x")
    )
    assert digest(content="") == digest() != digest(content="hi")
    picture = Plain({"role": "assistant", "content": [{"type": "image"}]}, (PICTURE,))
    assert message_digest(picture) != digest(content="")
    heads = History.of(
        [Plain({"role": "user", "content": "a"}), Plain({"role": "user", "content": "a"})]
    ).heads
    assert len(set(heads)) == 3


def test_items_of_one_model_turn_are_one_message() -> None:
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    items = [
        {"role": "user", "content": "q"},
        {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "hm"}]},
        {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "a"}]},
        {**call, "generation_token_ids": [1]},
        {"type": "function_call_output", "call_id": "c", "output": "r"},
        call,
        {"role": "assistant", "content": "b"},
    ]
    roles = [(m["role"], len(m.get("tool_calls", ()))) for m in chat_messages(items, "be brief")]
    assert roles == [
        ("system", 0),
        ("user", 0),
        ("assistant", 1),
        ("tool", 0),
        ("assistant", 1),
        ("assistant", 0),
    ]
    turn = chat_messages(items, None)[1]
    assert turn["reasoning_content"] == "hm" and turn["generation_token_ids"] == [1]
    for bad in ({"type": "item_reference", "id": "x"}, "text"):
        with pytest.raises(OmnifleetError) as caught:
            chat_messages([bad], None)
        assert caught.value.reason is Reason.INVALID_REQUEST
