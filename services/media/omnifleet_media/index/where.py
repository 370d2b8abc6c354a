"""Where an index is, fit to be shown."""

from __future__ import annotations


def without_secrets(index: str) -> str:
    """The setting `media.index` without user and password."""
    scheme, found, rest = index.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2].partition('?')[0]}" if found else index
