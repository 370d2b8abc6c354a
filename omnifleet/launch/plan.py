"""From a recipe to the commands of its services. The same commands run locally, in containers and under Ray."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.config.load import dump_recipe
from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.launch.port import ProcessSpec
from omnifleet.service import load_tokens

ORDER = ("media", "reward", "gateway")
"""Services that come up before workers and trainer, in this order."""


def prepare_run(recipe: Recipe) -> Path:
    """Make the run's folder with its resolved recipe and tokens; returns it (absolute)."""
    run_dir = recipe.run_dir.resolve()
    (run_dir / "logs").mkdir(parents=True, exist_ok=True)
    scratch = run_dir / ".recipe.yaml.tmp"
    scratch.write_text(dump_recipe(recipe))
    scratch.replace(run_dir / "recipe.yaml")
    load_tokens(run_dir, recipe.auth.tokens_file)
    return run_dir


_TRAINERS = frozenset(("data", "evaluation", "metrics", "objective", "reward", "sampling", "trainer"))
"""Sections of a recipe that only the trainer reads, at its start."""


def check_unchanged(running: Recipe, asked: Recipe, *, training: bool) -> None:
    """What a run that is up was started with, against what is asked of it now; what only a trainer reads may change until one runs.

    Raises OmnifleetError(CONFLICT) with the fields that differ.
    """
    was, now = _fields(running.model_dump(mode="json")), _fields(asked.model_dump(mode="json"))
    differ = [name for name in sorted(was.keys() | now.keys()) if was.get(name) != now.get(name)]
    bound = [name for name in differ if training or name.partition(".")[0] not in _TRAINERS]
    if not bound:
        return
    shown = ", ".join(f"{name} is {was.get(name)}, asked {now.get(name)}" for name in bound[:3])
    more = f" and {len(bound) - 3} more" if len(bound) > 3 else ""
    name = running.run.name
    raise OmnifleetError(
        Reason.CONFLICT,
        f"run {name} is up with other settings: {shown}{more}; `omnifleet down --run {name}` ends it, run.name=NAME starts another",
        knob=bound[0],
    )


def _fields(body: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Dotted name -> value."""
    found: dict[str, Any] = {}
    for key, value in body.items():
        inner = (
            _fields(value, f"{prefix}{key}.") if isinstance(value, dict) and value else {prefix + key: value}
        )
        found |= inner
    return found


def service_spec(run_dir: Path, service: str, *, as_json: bool = False, gpus: int = 0) -> ProcessSpec:
    """Command of media, reward, gateway or trainer. gpus: how many of its own it needs from a scheduler."""
    command = [*_omnifleet(), service, "serve", "--run-dir", str(run_dir)]
    resources = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
    return ProcessSpec(
        service, command + _log_flag(as_json), {}, run_dir / "logs" / f"{service}.log", resources
    )


def trainer_gpus(recipe: Recipe) -> int:
    """GPUs of the trainer's own, on its node: one a rank where engines are on GPUs too and do not take turns with it."""
    apart = not recipe.colocated and recipe.rollout.engine.kv_cache_memory_bytes is None
    parallel = recipe.trainer.parallel
    return parallel.world // parallel.nodes if apart and recipe.cluster is not None else 0


def follower_specs(run_dir: Path, recipe: Recipe, *, as_json: bool = False) -> list[ProcessSpec]:
    """Commands of the policy's other nodes, one each, with as many GPUs as the trainer's."""
    gpus = trainer_gpus(recipe)
    specs = []
    for node in range(1, recipe.trainer.parallel.nodes):
        name = f"policy-node-{node}"
        command = [*_omnifleet(), "trainer", "follow", "--run-dir", str(run_dir), "--node", str(node)]
        resources = {"CPU": 1.0} | ({"GPU": float(gpus)} if gpus else {})
        log = run_dir / "logs" / f"{name}.log"
        specs.append(ProcessSpec(name, command + _log_flag(as_json), {}, log, resources))
    return specs


def worker_spec(
    run_dir: Path,
    recipe: Recipe,
    name: str,
    *,
    as_json: bool = False,
    engine: str = "vllm",
    model: Path | None = None,
) -> ProcessSpec:
    """Command of one rollout worker. model: folder of the weights that it begins with; default: the recipe's."""
    kind, _, token_s = engine.partition(":")  # "fake:0.05": a fake engine that takes 50 ms a token
    command = [*_omnifleet(), "rollout", "serve", "--run-dir", str(run_dir), "--name", name, "--engine", kind]
    command += ["--fake-token-s", token_s] if token_s else []
    command += ["--model", str(model)] if model else []
    on_gpu = recipe.rollout.engine.kv_cache_memory_bytes is None
    resources = {"CPU": 1.0, "GPU": float(recipe.rollout.engine.tensor_parallel_size if on_gpu else 0)}
    return ProcessSpec(name, command + _log_flag(as_json), {}, run_dir / "logs" / f"{name}.log", resources)


def newest_weights(run_dir: Path) -> Path | None:
    """Weights of the newest complete checkpoint, as engines load them; None if the run has none."""
    steps = {
        path: tuple(int(part) for part in path.name[5:].split("."))
        for path in (run_dir / "checkpoints").glob("step_*")
        if path.name[5:].replace(".", "", 1).isdigit()
    }
    for path in sorted(steps, key=lambda path: steps[path], reverse=True):
        if (path / "policy" / "config.json").is_file():
            return path / "policy"
    return None


def _omnifleet() -> list[str]:
    return [sys.executable, "-m", "omnifleet"]


def _log_flag(as_json: bool) -> list[str]:
    return ["--log-json"] if as_json else []
