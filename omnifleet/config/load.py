"""YAML with inheritance (`extends:`) and dotted overrides (`trainer.steps=20`) -> a checked Recipe."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError

from omnifleet.config.base import config_error
from omnifleet.config.recipe import PLAN, Recipe
from omnifleet.errors import Reason, invalid

_DEPTH = 8


def resolve_recipe_path(name: str) -> Path:
    """A path as given, or NAME / NAME.yaml in ./recipes or among the packaged recipes. Raises INVALID_CONFIG."""
    for folder in (Path(), *_folders()):
        for candidate in (folder / name, folder / f"{name}.yaml"):
            if candidate.is_file():
                return candidate
    raise invalid(
        f"recipe {name!r} not found; known: {', '.join(known_recipes())}", reason=Reason.INVALID_CONFIG
    )


def known_recipes() -> dict[str, Path]:
    """Name -> file of the recipes in ./recipes and among the packaged ones, the nearest first.

    Files that begin with an underscore are parts of others.
    """
    found: dict[str, Path] = {}
    for folder in _folders():
        for path in sorted(folder.rglob("[!_]*.yaml")) if folder.is_dir() else ():
            found.setdefault(path.relative_to(folder).with_suffix("").as_posix(), path)
    return dict(sorted(found.items()))


def _folders() -> tuple[Path, ...]:
    here = Path(__file__).resolve()
    return Path("recipes"), here.parent.parent / "_recipes", here.parent.parent.parent / "recipes"


def read_layers(path: Path, depth: int = 0) -> dict[str, Any]:
    """The file's mapping, merged over what it extends (nearest wins, of several the last; lists replace).

    Raises INVALID_CONFIG.
    """
    if depth > _DEPTH:
        raise invalid(f"{path}: `extends` goes deeper than {_DEPTH} files", reason=Reason.INVALID_CONFIG)
    try:
        body = yaml.safe_load(path.read_text()) or {}
    except (OSError, yaml.YAMLError) as error:
        raise invalid(f"{path}: {error}", reason=Reason.INVALID_CONFIG) from error
    if not isinstance(body, dict):
        raise invalid(
            f"{path}: a recipe is a mapping, not {type(body).__name__}", reason=Reason.INVALID_CONFIG
        )
    extended = body.pop("extends", None) or []
    layers: dict[str, Any] = {}
    for parent in extended if isinstance(extended, list) else [extended]:
        base = path.parent / str(parent)
        if not base.is_file():
            raise invalid(
                f"{path}: extends {parent!r}, which is not a file beside it", reason=Reason.INVALID_CONFIG
            )
        layers = merge(layers, read_layers(base, depth + 1))
    return merge(layers, body)


def merge(base: Mapping[str, Any], top: Mapping[str, Any]) -> dict[str, Any]:
    """Mappings merge key by key; everything else in `top` replaces."""
    merged = dict(base)
    for key, value in top.items():
        below = merged.get(key)
        both = isinstance(below, Mapping) and isinstance(value, Mapping)
        merged[key] = merge(below, value) if both else value  # type: ignore[arg-type]
    return merged


def apply_overrides(body: dict[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """`a.b=value` with the value in YAML. Raises INVALID_CONFIG for a malformed one."""
    for override in overrides:
        dotted, equals, text = override.partition("=")
        if not equals or not dotted:
            raise invalid(
                f"override {override!r} is not of the form section.field=value", reason=Reason.INVALID_CONFIG
            )
        try:
            value = yaml.safe_load(text)
        except yaml.YAMLError as error:
            raise invalid(f"override {override!r}: {error}", reason=Reason.INVALID_CONFIG) from error
        nested: Any = value
        for part in reversed(dotted.split(".")):
            nested = {part: nested}
        body = merge(body, nested)
    return body


def recipe_from_mapping(body: Mapping[str, Any], source: str, *, plan: bool = False) -> Recipe:
    """Check a mapping. plan: take what no backend can run, too. Raises OmnifleetError(INVALID_CONFIG) with every problem."""
    try:
        return Recipe.model_validate(body, context={PLAN: plan})
    except ValidationError as error:
        raise config_error(error, Recipe, source) from None


def load_recipe(name: str, overrides: Sequence[str] = (), *, plan: bool = False) -> Recipe:
    """Find, merge, override and check a recipe; plan: see `recipe_from_mapping`. Raises OmnifleetError(INVALID_CONFIG)."""
    path = resolve_recipe_path(name)
    source = f"{path} with {' '.join(overrides)}" if overrides else str(path)
    return recipe_from_mapping(apply_overrides(read_layers(path), overrides), source, plan=plan)


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML that loads to the same recipe."""
    return yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False)
