"""Controls: the same questions with blank pictures, or with the pictures of other rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from omnifleet_trainer.data import PromptRow, blank_pictures, shuffle_pictures

Pictures = Literal["real", "blank", "shuffled"]


def altered(rows: Sequence[PromptRow], pictures: Pictures) -> list[PromptRow]:
    """Rows with their own pictures, grey ones of the same size, or each with another row's."""
    match pictures:
        case "real":
            return list(rows)
        case "blank":
            return blank_pictures(rows)
        case "shuffled":
            return shuffle_pictures(rows)
