"""The strict base model and the one way in which validation errors are told to people."""

from __future__ import annotations

import difflib
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo

from omnifleet.errors import OmnifleetError, Reason

PLAN = "plan"
"""Key of a validation context: the recipe is to be looked at and laid out, so what no backend can run is no error."""


def is_plan(info: ValidationInfo) -> bool:
    """Whether this validation is of a plan."""
    return bool((info.context or {}).get(PLAN))


class StrictModel(BaseModel):
    """Unknown keys are errors; the docstring under a field is its help text; values are frozen after load."""

    model_config = ConfigDict(
        extra="forbid", use_attribute_docstrings=True, frozen=True, validate_default=True
    )


def config_error(error: ValidationError, model: type[BaseModel], source: str) -> OmnifleetError:
    """All problems of a load as one error: a line each, with field, value, what is allowed, and a suggestion."""
    lines = [_explain(item, model) for item in error.errors(include_url=False)]
    first = ".".join(str(part) for part in error.errors()[0]["loc"])
    return OmnifleetError(Reason.INVALID_CONFIG, f"{source}: " + "; ".join(lines), knob=first)


def _explain(item: Any, model: type[BaseModel]) -> str:
    path = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        return f"unknown key {path!r}{_suggest(item['loc'], model)}"
    if item["type"] == "missing":
        return f"{path} is required"
    message = str(item["msg"]).removeprefix("Value error, ")
    value = item.get("input")
    shown = f" = {value!r}" if path and isinstance(value, str | int | float | bool | None) else ""
    return f"{path}{shown}: {message}" if path else message


def _suggest(loc: tuple[Any, ...], model: type[BaseModel]) -> str:
    siblings = list(_fields_at(loc[:-1], model))
    close = difflib.get_close_matches(str(loc[-1]), siblings, n=1, cutoff=0.5)
    if close:
        return f", did you mean {close[0]!r}?"
    return f", allowed here: {', '.join(sorted(siblings))}" if siblings else ""


def _fields_at(loc: tuple[Any, ...], model: type[BaseModel]) -> Iterator[str]:
    current: type[BaseModel] | None = model
    for part in loc:
        if isinstance(part, int) or current is None:
            continue
        field = current.model_fields.get(str(part))
        current = _model_in(field.annotation) if field else None
    if current is not None:
        yield from current.model_fields


def _model_in(annotation: Any) -> type[BaseModel] | None:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for inner in get_args(annotation):
        found = _model_in(inner)
        if found is not None:
            return found
    return None
