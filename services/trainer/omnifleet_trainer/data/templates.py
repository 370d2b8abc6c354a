"""Prompt templates: text files with {} where a row's own text goes; those of the named sets are in `prompts/`."""

from __future__ import annotations

from pathlib import Path

from omnifleet.errors import OmnifleetError, Reason

_OWN = Path(__file__).with_name("prompts")


def set_template(name: str) -> str:
    """The template of a named set; "{}" for one whose questions say it all."""
    path = _OWN / f"{name}.txt"
    return read_template(path) if path.is_file() else "{}"


def read_template(path: Path) -> str:
    """A template without its last line break: a file, or the bare name of one that is shipped.

    Raises INVALID_CONFIG for a file that is missing or has no {}.
    """
    shipped = _OWN / f"{path}.txt"
    try:
        text = (shipped if len(path.parts) == 1 and shipped.is_file() else path).read_text(encoding="utf-8")
    except OSError as error:
        raise _refused(f"{path}: {error}") from error
    if "{}" not in text:
        raise _refused(f"{path} has no {{}} for the text")
    return text.removesuffix("\n")


def _refused(message: str) -> OmnifleetError:
    return OmnifleetError(Reason.INVALID_CONFIG, f"prompt template {message}", knob="data.train.prompt")
