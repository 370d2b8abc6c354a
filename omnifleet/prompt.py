"""Placeholders in prompts: one token a media item on the wire (unexpanded), one token a feature in the model (expanded)."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from omnifleet.errors import invalid

Brackets = tuple[tuple[int, ...], tuple[int, ...]]
"""Tokens that a family writes before and after the features of every picture, its chat template having written none."""
NO_BRACKETS: Brackets = ((), ())


def expand_placeholders(
    token_ids: Sequence[int], placeholder: int, counts: Sequence[int], brackets: Brackets = NO_BRACKETS
) -> list[int]:
    """Repeat the k-th `placeholder` of an unexpanded prompt `counts[k]` times, between the family's brackets.

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
    before, after = brackets
    for token in token_ids:
        expanded.extend([*before, *[token] * next(remaining), *after] if token == placeholder else [token])
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


def lay_out(
    token_ids: Sequence[int],
    items: Sequence[tuple[int, int]],
    placeholders: Collection[int],
    brackets: Brackets = NO_BRACKETS,
) -> tuple[list[int], list[tuple[int, int]]]:
    """Expand a prompt with media of several kinds; (expanded ids, (offset, length) of each item within them).

    token_ids: [T] ids with one placeholder an item. items: (placeholder token, features) of each, in order.
    placeholders: tokens that stand for media. Raises OmnifleetError(INVALID_REQUEST) if they do not match the items in
    number, order and kind: media is never dropped, and never given another's place.
    """
    found = [token for token in token_ids if token in placeholders]
    wanted = [token for token, _ in items]
    if found != wanted:
        expanded = len(found) == sum(length for _, length in items) > len(items)
        raise invalid(
            f"the prompt's media placeholders are {_short(found)}, its {len(items)} media items want {_short(wanted)}; "
            + ("it looks expanded already: " if expanded else "")
            + "send one placeholder an item, unexpanded, in the order of the items"
        )
    ids: list[int] = []
    ranges: list[tuple[int, int]] = []
    before, after = brackets
    for token in token_ids:
        if token not in placeholders:
            ids.append(token)
            continue
        length = items[len(ranges)][1]
        ranges.append((len(ids) + len(before), length))
        ids += [*before, *[token] * length, *after]
    return ids, ranges


def _short(tokens: Sequence[int]) -> str:
    shown = ", ".join(map(str, tokens[:6]))
    return f"[{shown}, ... {len(tokens)} in all]" if len(tokens) > 6 else f"[{shown}]"
