"""Metric sinks: each library really writes what a reader of its own reads; the feeder loses nothing but a sink's."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from omnifleet.config.load import load_recipe
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import WeightVersion
from omnifleet_trainer.loop.journal import Journal, StepRecord
from omnifleet_trainer.sinks.build import open_sinks
from omnifleet_trainer.sinks.feeding import feeding
from omnifleet_trainer.sinks.port import Sink, library


def record(step: int, **metrics: float) -> StepRecord:
    return StepRecord(step, WeightVersion("run", "l", step), {"reward": step / 10, **metrics}, 1000 * step)


def opened(tmp_path: Path, *names: str, counters: Counters | None = None) -> list[Sink]:
    recipe = load_recipe("cpu-tiny", [f"metrics.sinks=[{', '.join(names)}]"])
    return open_sinks(recipe, tmp_path, counters or Counters("trainer"))


def write_all(sink: Sink, tmp_path: Path) -> None:
    folder = tmp_path / "mismatch"
    folder.mkdir()
    Image.new("RGB", (8, 6), (255, 0, 0)).save(folder / "step-2.png")
    for step in (1, 2):
        sink.write(record(step, **{"lag/0": 0.5, "advantages/max": 2.0}))
    sink.picture(2, folder / "step-2.png")
    sink.close()


def test_tensorboard(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (sink,) = opened(tmp_path, "tensorboard")
    write_all(sink, tmp_path)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(e.step, round(e.value, 6)) for e in events.Scalars("reward")] == [(1, 0.1), (2, 0.2)]
    assert events.Scalars("lag/0")[0].wall_time == 1.0
    (picture,) = events.Images("mismatch")
    assert (picture.step, picture.width, picture.height) == (2, 8, 6)


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    monkeypatch.setenv("WANDB_CONSOLE", "off")
    (sink,) = opened(tmp_path, "wandb")
    write_all(sink, tmp_path)
    (run,) = (tmp_path / "wandb").glob("offline-run-*")
    (log,) = run.glob("run-*.wandb")
    body = log.read_bytes()
    assert b"advantages/max" in body and b"cpu-tiny" in body
    assert list(run.glob("files/media/images/*.png"))


def test_mlflow_in_the_runs_folder(tmp_path: Path) -> None:
    import mlflow

    (sink,) = opened(tmp_path, "mlflow")
    write_all(sink, tmp_path)
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("omnifleet")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.status == "FINISHED" and run.info.run_name == "cpu-tiny"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert [(m.step, m.value, m.timestamp) for m in history] == [(1, 0.1, 1000), (2, 0.2, 2000)]
    assert [f.path for f in client.list_artifacts(run.info.run_id, "mismatch")] == ["mismatch/step-2.png"]


def test_prometheus_shows_the_newest_step_on_the_services_own_page(tmp_path: Path) -> None:
    counters = Counters("trainer")
    (sink,) = opened(tmp_path, "prometheus", counters=counters)
    write_all(sink, tmp_path)
    page = counters.exposition().decode()
    assert "omnifleet_trainer_step_reward 0.2" in page
    assert "omnifleet_trainer_step_lag_0 0.5" in page
    assert not counters.snapshot()


def test_a_missing_library_names_its_extra() -> None:
    with pytest.raises(OmnifleetError, match=r"omnifleet-trainer\[wandb\]") as missing:
        library("a_library_that_nobody_wrote", extra="wandb")
    assert missing.value.reason is Reason.UNSUPPORTED and missing.value.knob == "metrics.sinks"


def test_a_sink_named_twice_is_refused() -> None:
    with pytest.raises(OmnifleetError, match="named twice"):
        load_recipe("cpu-tiny", ["metrics.sinks=[wandb, wandb]"])


class Remembering:
    name = "memory"

    def __init__(self, error: Exception | None = None) -> None:
        self.seen: list[Any] = []
        self.closed = False
        self._error = error
        self.told: Callable[[], Any] = lambda: None

    def write(self, record: StepRecord) -> None:
        if self._error is not None:
            raise self._error
        self.seen.append((record.step, dict(record.metrics)))
        self.told()

    def picture(self, step: int, path: Path) -> None:
        self.seen.append((step, path.name))

    def close(self) -> None:
        self.closed = True


async def test_the_feeder_follows_the_journal_to_its_amended_end(tmp_path: Path) -> None:
    loop, three = asyncio.get_running_loop(), asyncio.Event()
    journal, sink = Journal(tmp_path, step=0), Remembering()
    sink.told = lambda: loop.call_soon_threadsafe(three.set) if len(sink.seen) == 3 else None
    broken = Remembering(OmnifleetError(Reason.UNAVAILABLE, "no network"))
    counters = Counters("trainer")
    (tmp_path / "step-2.png").touch()
    journal.write(record(1))
    async with feeding(journal, [broken, sink], after=1, pictures=tmp_path, counters=counters):
        journal.write(record(2))
        journal.write(record(3))
        async with asyncio.timeout(30):
            await three.wait()
        journal.amend({"heldout_reward": 0.75})
    assert sink.seen == [
        (2, {"reward": 0.2}),
        (2, "step-2.png"),
        (3, {"reward": 0.3}),
        (3, {"reward": 0.3, "heldout_reward": 0.75}),
    ]
    assert sink.closed and broken.closed
    assert counters.count("sink_errors") == 3
