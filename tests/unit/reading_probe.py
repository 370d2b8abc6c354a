"""The probe as a role that may go on to read files, as processors of transformers do."""

from __future__ import annotations

from tests.unit.sandbox_probe import prepare, work

OPENS_FILES = True

__all__ = ["OPENS_FILES", "prepare", "work"]
