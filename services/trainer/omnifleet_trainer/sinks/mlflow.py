"""MLflow: a tracking server, or a SQLite file of the run (`mlflow ui --backend-store-uri sqlite:///RUN/mlflow.db`)."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.loop.journal import StepRecord
from omnifleet_trainer.sinks.port import library

_AT_ONCE = 1000  # metrics that one call may log


class MlflowSink:
    """One MLflow run a life of the trainer, in the experiment `project`."""

    name = "mlflow"

    def __init__(
        self, folder: Path, *, uri: str | None, project: str, run: str, config: Mapping[str, Any]
    ) -> None:
        """uri: tracking server; None = files in `folder`. Raises UNSUPPORTED without the extra `mlflow`, UNAVAILABLE."""
        self._mlflow = library("mlflow", extra="mlflow")
        self._entities = library("mlflow.entities", extra="mlflow")
        with _Telling(self._mlflow):
            files = folder.resolve()
            self._client = self._mlflow.MlflowClient(tracking_uri=uri or f"sqlite:///{files / 'mlflow.db'}")
            artifacts = None if uri else (files / "mlartifacts").as_uri()
            found = self._client.get_experiment_by_name(project)
            experiment = (
                found.experiment_id
                if found
                else self._client.create_experiment(project, artifact_location=artifacts)
            )
            self._run = self._client.create_run(experiment, run_name=run).info.run_id
            self._client.log_dict(self._run, dict(config), "recipe.json")

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        metrics = [
            self._entities.Metric(name, value, record.unix_ms, record.step)
            for name, value in record.metrics.items()
        ]
        with _Telling(self._mlflow):
            for start in range(0, len(metrics), _AT_ONCE):
                self._client.log_batch(self._run, metrics=metrics[start : start + _AT_ONCE])

    def picture(self, step: int, path: Path) -> None:
        """See `Sink`."""
        with _Telling(self._mlflow):
            self._client.log_artifact(self._run, str(path), artifact_path=path.parent.name)

    def close(self) -> None:
        """See `Sink`."""
        with _Telling(self._mlflow):
            self._client.set_terminated(self._run)


class _Telling:
    """Inside, MLflow's own errors become UNAVAILABLE."""

    def __init__(self, mlflow: Any) -> None:
        self._error = mlflow.exceptions.MlflowException

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, self._error):
            raise OmnifleetError(
                Reason.UNAVAILABLE, f"MLflow: {error}", retryable=True, knob="metrics.mlflow_uri"
            ) from error
