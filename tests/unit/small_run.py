"""A run that says the least, for tests of what starts and watches processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from omnifleet.config.load import recipe_from_mapping
from omnifleet.config.recipe import Recipe
from omnifleet.launch.plan import prepare_run
from omnifleet.launch.supervisor import Supervisor
from omnifleet.service import write_record


def small_recipe(root: Path, **sections: Any) -> Recipe:
    """Runs under `root`; sections: what a test adds."""
    body = {
        "run": {"name": "r", "root": str(root)},
        "model": {"path": "m"},
        "reward": [{"name": "format"}],
        "data": {"max_prompt_tokens": 64},
    }
    return recipe_from_mapping(body | sections, "t")


def supervisor_of(root: Path, launcher: Any, fleet: Any) -> Supervisor:
    """Over a run whose gateway is said to be up; `fleet` stands for its registry."""
    recipe = small_recipe(root)
    run_dir = prepare_run(recipe)
    write_record(run_dir, "gateway", grpc="127.0.0.1:1", http="")
    supervisor = Supervisor(run_dir, recipe, launcher)
    supervisor._fleet = cast(Any, fleet)
    return supervisor
