"""From a recipe to its sinks. A library is imported only if its sink is asked for."""

from __future__ import annotations

from pathlib import Path

from omnifleet.config.recipe import Recipe
from omnifleet.telemetry.counters import Counters
from omnifleet_trainer.sinks.port import Sink


def open_sinks(recipe: Recipe, run_dir: Path, counters: Counters) -> list[Sink]:
    """The sinks of `recipe.metrics.sinks`, files below run_dir. Raises UNSUPPORTED, UNAVAILABLE; opened ones are closed."""
    opened: list[Sink] = []
    try:
        for name in recipe.metrics.sinks:
            opened.append(_open(name, recipe, run_dir, counters))
    except BaseException:
        for sink in opened:
            sink.close()
        raise
    return opened


def _open(name: str, recipe: Recipe, run_dir: Path, counters: Counters) -> Sink:
    metrics, run, config = recipe.metrics, recipe.run.name, recipe.model_dump(mode="json")
    match name:
        case "tensorboard":
            from omnifleet_trainer.sinks.tensorboard import TensorBoardSink

            return TensorBoardSink(run_dir / "tensorboard")
        case "wandb":
            from omnifleet_trainer.sinks.wandb import WandbSink

            return WandbSink(
                run_dir, project=metrics.project, run=run, mode=metrics.wandb_mode, config=config
            )
        case "mlflow":
            from omnifleet_trainer.sinks.mlflow import MlflowSink

            return MlflowSink(
                run_dir, uri=metrics.mlflow_uri, project=metrics.project, run=run, config=config
            )
    from omnifleet_trainer.sinks.prometheus import PrometheusSink

    return PrometheusSink(counters)
