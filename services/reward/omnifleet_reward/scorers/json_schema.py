"""`json_schema`: is the answer JSON that follows a schema?"""

from __future__ import annotations

import json
from typing import Any

from pydantic import Field, field_validator

from omnifleet_reward.places import AnswerPlace, Place
from omnifleet_reward.scorer import UNPARSEABLE, Reply, Scorer, Verdict, right_or_wrong


class Params(AnswerPlace):
    """The schema, and whether the reference counts."""

    places: tuple[Place, ...] = Field(("tag", "fence", "text"), min_length=1)
    document_schema: dict[str, Any]
    """JSON Schema, draft 2020-12 unless it names another; references lead nowhere but into itself."""
    equals_reference: bool = False
    """The answer must also equal the reference, read as JSON."""
    example: str | None = None
    """A document with full marks, for the reachable maximum; default: the schema's first entry of `examples`."""

    @field_validator("document_schema")
    @classmethod
    def _is_schema(cls, schema: dict[str, Any]) -> dict[str, Any]:
        from jsonschema import SchemaError
        from jsonschema.validators import validator_for

        try:
            validator_for(schema).check_schema(schema)
        except SchemaError as error:
            raise ValueError(f"not a JSON schema: {error.message}") from None
        return schema


def prepare() -> None:
    """Import jsonschema."""
    import jsonschema  # noqa: F401


def judge(reply: Reply, params: Params) -> Verdict:
    """score = 1 if the answer is JSON, valid under the schema and, if asked, equal to the reference; else 0.

    Text that is no JSON is 0 and unparseable; NaN and Infinity are no JSON. The answer stands in a tag, else in the last
    fenced block, else it is the whole reply.
    Examples (schema {"type": "object", "required": ["x"]}): `{"x": 1}` → 1; `{}` → 0; `x = 1` → 0.
    """
    from jsonschema.validators import validator_for
    from referencing import Registry
    from referencing.exceptions import Unresolvable

    text = params.find(reply.response)
    try:
        document = None if text is None else _loads(text)
    except (ValueError, RecursionError):
        return UNPARSEABLE
    if text is None:
        return UNPARSEABLE
    registry: Any = Registry()
    validator = validator_for(params.document_schema)(params.document_schema, registry=registry)
    try:
        valid = validator.is_valid(document)
    except Unresolvable as error:
        raise ValueError(f"the schema refers to {error.ref!r}, which is not in it") from None
    if valid and params.equals_reference:
        valid = _canonical(document) == _canonical(_loads(reply.ground_truth))
    return right_or_wrong(valid)


def _loads(text: str) -> Any:
    return json.loads(text, parse_constant=_refuse, parse_float=_number)


def _number(text: str) -> float | int:
    """1.0 is 1, as JSON sees it."""
    value = float(text)
    return int(value) if value.is_integer() else value


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")


def _canonical(document: Any) -> str:
    return json.dumps(document, sort_keys=True)


def examples(prompt_suffix: str, params: Params) -> list[Reply]:
    """The example that the parameters or the schema give."""
    given = params.document_schema.get("examples") or []
    text = params.example or (json.dumps(given[0]) if given else None)
    return [] if text is None else [Reply(params.put(text), text)]


SCORER = Scorer(
    "json_schema",
    "1",
    "Answer is JSON that follows a schema.",
    judge,
    Params,
    examples,
    beyond=0.0,
    prepare=prepare,
)
