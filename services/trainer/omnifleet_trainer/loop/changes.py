"""A recipe that changed between two lives of a run: what a resume may take over, and what the ledger forbids."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.config.recipe import Recipe
from omnifleet.errors import Reason, invalid

log = logging.getLogger("omnifleet.trainer")

RECIPE = "recipe.json"
_FIXED = (
    "data.train",  # the ledger holds these prompts, in the order of an epoch
    "trainer.generations_per_prompt",  # ready groups have this many samples
    "rollout.logprobs_mode",  # ready groups carry logprobs of this kind
    "sampling.temperature",  # and at this temperature
)
_ELSEWHERE = ("listen", "http_listen", "root", "tokens_file")
"""Settings that say where a process is, not what it trains."""


def recipe_digest(recipe: Recipe) -> str:
    """Of all settings."""
    return str(digest_bytes(_body(recipe), "recipe"))


def keep_recipe(recipe: Recipe, folder: Path) -> None:
    """Put the recipe into a checkpoint, for `check_unchanged`."""
    (folder / RECIPE).write_bytes(_body(recipe))


def check_unchanged(recipe: Recipe, folder: Path, digest: str) -> None:
    """Compare a recipe with that of the checkpoint in `folder`, whose digest is `digest`.

    Every change is logged as a warning. Raises INVALID_CONFIG for one that would break the ledger's meaning.
    """
    if digest == recipe_digest(recipe):
        return
    path = folder / RECIPE
    if not path.exists():
        log.warning("the recipe is not that of %s, which does not say what changed", folder.name)
        return
    try:
        before = dict(_leaves(json.loads(path.read_bytes())))
    except ValueError as error:
        raise invalid(f"{path} cannot be read: {error}", knob="run.root", reason=Reason.CORRUPT) from error
    now = dict(_leaves(json.loads(_body(recipe))))
    changes = {
        name: f"{name} {before.get(name)!r} -> {now.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and name.rpartition(".")[2] not in _ELSEWHERE
    }
    if changes:
        log.warning("the recipe changed since %s: %s", folder.name, "; ".join(changes.values()))
    forbidden = [said for name, said in changes.items() if name.startswith(_FIXED)]
    if forbidden:
        raise invalid(
            f"{folder.name} cannot go on with {'; '.join(forbidden)}: its ledger was made with the old value",
            knob="put the old value back, or start with --fresh",
            reason=Reason.INVALID_CONFIG,
        )


def _body(recipe: Recipe) -> bytes:
    return canonical_json(recipe.model_dump(mode="json"))


def _leaves(body: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted name and value of each setting; lists are values."""
    if isinstance(body, Mapping) and (body or not name):
        for key, value in body.items():
            yield from _leaves(value, f"{name}.{key}" if name else str(key))
    else:
        yield name, body
