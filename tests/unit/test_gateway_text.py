"""Text from tokens: whatever the pieces, the text is that of the whole up to the first stop string."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omnifleet_rollout.gateway.text import TextStream


def decode(ids: Sequence[int]) -> str:
    """One token a byte: the hardest case for characters of several bytes."""
    return bytes(ids).decode(errors="replace")


@given(
    text=st.text(alphabet="ab<>/é漢🙂 ", max_size=30),
    stop=st.lists(st.text(alphabet="ab<>/é", min_size=1, max_size=4), max_size=2),
    cuts=st.lists(st.integers(0, 100), max_size=8),
)
def test_pieces_give_the_whole_text_up_to_the_first_stop(text: str, stop: list[str], cuts: list[int]) -> None:
    ids = list(text.encode())
    edges = sorted({0, len(ids), *(c for c in cuts if c < len(ids))})
    stream, out = TextStream(decode, stop), ""
    for start, end in pairwise(edges):
        piece = stream.push(ids[start:end])
        assert "\ufffd" not in piece
        out += piece
    out += stream.flush()
    first = min((at for at in (text.find(s) for s in stop) if at >= 0), default=len(text))
    assert out == text[:first]


def test_text_that_cannot_become_a_stop_is_not_held_back() -> None:
    stream = TextStream(decode, ["</answer>"])
    assert stream.push(list(b"red </ans")) == "red "
    assert stream.push(list(b"wers")) == "</answers"


def test_a_half_character_at_the_end_is_shown_as_such() -> None:
    stream = TextStream(decode)
    assert stream.push(list("é".encode()[:1])) == ""
    assert stream.flush() == "\ufffd"


def test_a_whole_reply_is_decoded_once() -> None:
    seen: list[bytes] = []

    def counted(ids: Sequence[int]) -> str:
        seen.append(bytes(ids))
        return decode(ids)

    stream = TextStream(counted)
    assert stream.push(list(b"42 apples")) + stream.flush() == "42 apples"
    assert seen == [b"42 apples"]
