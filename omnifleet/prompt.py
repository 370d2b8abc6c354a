"""Placeholders in prompts: one token a media item on the wire (unexpanded), one token a feature in the model (expanded)."""

from __future__ import annotations

from collections.abc import Sequence

from omnifleet.errors import invalid


def expand_placeholders(token_ids: Sequence[int], placeholder: int, counts: Sequence[int]) -> list[int]:
    """Repeat the k-th `placeholder` of an unexpanded prompt `counts[k]` times.

    token_ids: [T] ids; counts: features of each media item, in order. Returns the expanded ids.
    Raises OmnifleetError(INVALID_REQUEST) if placeholders and items differ in number.
    """
    found = sum(token == placeholder for token in token_ids)
    if found != len(counts):
        raise invalid(
            f"the prompt has {found} media placeholders (token {placeholder}) for {len(counts)} media items; "
            "send one placeholder an item, unexpanded"
        )
    expanded: list[int] = []
    remaining = iter(counts)
    for token in token_ids:
        expanded.extend([token] * next(remaining) if token == placeholder else [token])
    return expanded


def placeholder_ranges(
    token_ids: Sequence[int], placeholder: int, counts: Sequence[int]
) -> list[tuple[int, int]]:
    """(offset, length) of each item's features within the expanded prompt of the same arguments."""
    ranges, position, remaining = [], 0, iter(counts)
    for token in token_ids:
        length = 1
        if token == placeholder:
            length = next(remaining)
            ranges.append((position, length))
        position += length
    return ranges
