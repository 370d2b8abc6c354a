"""Weights & Biases. Offline by default: `wandb sync RUN/wandb/offline-run-*` uploads later."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.loop.journal import StepRecord
from omnifleet_trainer.sinks.port import library


class WandbSink:
    """One W&B run a life of the trainer, in the group of the run's name."""

    name = "wandb"

    def __init__(self, folder: Path, *, project: str, run: str, mode: str, config: Mapping[str, Any]) -> None:
        """mode: online | offline. Raises UNSUPPORTED without the extra `wandb`, UNAVAILABLE if W&B refuses."""
        self._wandb = library("wandb", extra="wandb")
        folder.mkdir(parents=True, exist_ok=True)
        try:
            self._run = self._wandb.init(
                project=project, group=run, name=run, dir=str(folder), mode=mode, config=dict(config)
            )
        except self._wandb.Error as error:
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"W&B refused the run: {error}", knob="metrics.wandb_mode = offline"
            ) from error

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        self._log(record.step, record.metrics)

    def picture(self, step: int, path: Path) -> None:
        """See `Sink`."""
        self._log(step, {path.parent.name: self._wandb.Image(str(path))})

    def close(self) -> None:
        """See `Sink`. `finish` returns before the last records are on disk; the end of W&B's own process does not."""
        self._run.finish()
        self._wandb.teardown()

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        try:
            self._run.log({**values, "step": step}, step=step)
        except self._wandb.Error as error:
            raise OmnifleetError(Reason.UNAVAILABLE, f"W&B: {error}", retryable=True) from error
