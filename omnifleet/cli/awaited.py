"""What a run does now, or waits for: the line below the live table."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.cli.status import ask_service
from omnifleet.config.recipe import Recipe
from omnifleet.launch.supervisor import read_state
from omnifleet.telemetry.words import duration

_DEADLINE_S = 1.0


def awaited(run_dir: Path, recipe: Recipe) -> str:
    """Ask the trainer and its supervisor; takes at most about a second."""
    status = asyncio.run(ask_service(run_dir, "trainer", deadline_s=_DEADLINE_S))
    processes = read_state(run_dir).get("processes", ())
    process: dict[str, Any] = next((p for p in processes if p["name"] == "trainer"), {})
    return in_words(status, process, recipe)


def in_words(status: Mapping[str, Any], process: Mapping[str, Any], recipe: Recipe) -> str:
    """status: the trainer's, as `ask_service` gives it. process: what the supervisor says of it, {} if it knows none."""
    facts, counters = status.get("facts", {}), status.get("counters", {})
    match status["state"]:
        case "down" if not process:
            return "the trainer's process is about to start"
        case "down":
            return f"the trainer loads {recipe.model.path} ({duration(process.get('since_s', 0))})"
        case "paused":
            return f"paused by an operator after step {facts['step']}"
        case "stopping":
            return "the step in hand ends, then a checkpoint is written"
        case "ended":
            return "the trainer ends"
        case "starting" | "training" | "finishing":
            doing: str = (
                facts.get("doing")
                or "the trainer has loaded the model, and is about to send the first weights"
            )
            if not doing.endswith("waiting for replies"):
                return doing
            ready, running = (int(counters.get(f"groups_{what}", 0)) for what in ("waiting", "running"))
            return (
                f"{doing}, {ready} of {recipe.trainer.prompts_per_step} groups ready, {running} being written"
            )
    return "the trainer does not answer: it ends, or is started again"
