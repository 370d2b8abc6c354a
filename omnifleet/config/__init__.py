"""Strict configuration of services and recipes: pydantic models, YAML inheritance, dotted overrides. Knows no service code."""

from omnifleet.config.base import StrictModel
from omnifleet.config.load import load_recipe, recipe_from_mapping, resolve_recipe_path
from omnifleet.config.recipe import Recipe

__all__ = ["Recipe", "StrictModel", "load_recipe", "recipe_from_mapping", "resolve_recipe_path"]
