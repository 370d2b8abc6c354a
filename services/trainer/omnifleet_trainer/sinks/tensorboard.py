"""TensorBoard event files in the run's folder."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from omnifleet_trainer.loop.journal import StepRecord
from omnifleet_trainer.sinks.port import library


class TensorBoardSink:
    """Scalars by metric name, plots as images; `tensorboard --logdir RUN/tensorboard` shows them."""

    name = "tensorboard"

    def __init__(self, folder: Path) -> None:
        """Raises UNSUPPORTED without the extra `tensorboard`."""
        library("tensorboard", extra="tensorboard")
        self._writer: Any = library("torch.utils.tensorboard", extra="tensorboard").SummaryWriter(str(folder))

    def write(self, record: StepRecord) -> None:
        """See `Sink`."""
        for name, value in record.metrics.items():
            self._writer.add_scalar(name, value, record.step, walltime=record.unix_ms / 1000)
        self._writer.flush()

    def picture(self, step: int, path: Path) -> None:
        """See `Sink`."""
        with Image.open(path) as image:
            pixels = np.asarray(image.convert("RGB"))
        self._writer.add_image(path.parent.name, pixels, step, dataformats="HWC")

    def close(self) -> None:
        """See `Sink`."""
        self._writer.close()
