"""Prompts with media of several kinds: every item gets its own place, or the prompt is refused whole."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.errors import OmnifleetError, Reason
from omnifleet.prompt import lay_out

IMAGE, VIDEO = 1, 2
text = st.integers(3, 9)
pieces = st.lists(st.one_of(text, st.tuples(st.sampled_from([IMAGE, VIDEO]), st.integers(1, 5))), max_size=12)


@given(pieces)
def test_each_item_lies_where_its_placeholder_was(parts: list[int | tuple[int, int]]) -> None:
    items = [part for part in parts if isinstance(part, tuple)]
    ids = [part[0] if isinstance(part, tuple) else part for part in parts]
    expanded, ranges = lay_out(ids, items, {IMAGE, VIDEO})
    assert [(expanded[at], length) for at, length in ranges] == items
    assert all(
        set(expanded[at : at + length]) == {token}
        for (at, length), (token, _) in zip(ranges, items, strict=True)
    )
    outside = [t for i, t in enumerate(expanded) if not any(at <= i < at + n for at, n in ranges)]
    assert outside == [part for part in parts if not isinstance(part, tuple)]


@given(pieces, st.data())
def test_a_changed_placeholder_is_always_seen(
    parts: list[int | tuple[int, int]], data: st.DataObject
) -> None:
    items = [part for part in parts if isinstance(part, tuple)]
    ids = [part[0] if isinstance(part, tuple) else part for part in parts]
    if not ids:
        return
    at = data.draw(st.integers(0, len(ids) - 1))
    other = data.draw(
        st.sampled_from([t for t in (IMAGE, VIDEO, 3) if (t in (IMAGE, VIDEO)) or ids[at] in (IMAGE, VIDEO)])
    )
    changed = [*ids[:at], other, *ids[at + 1 :]]
    same = [t for t in changed if t in (IMAGE, VIDEO)] == [t for t in ids if t in (IMAGE, VIDEO)]
    if same:
        return
    with pytest.raises(OmnifleetError) as refused:
        lay_out(changed, items, {IMAGE, VIDEO})
    assert refused.value.reason is Reason.INVALID_REQUEST
