"""What every backend of one rank does alike: steps, passes, metrics, checkpoints. A backend adds the model."""

from __future__ import annotations

import contextlib
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

from omnifleet.config.recipe import ObjectiveConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.batch.collate import MicroBatch, collate
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.objectives.logprobs import token_logprobs
from omnifleet_trainer.policy.flops import FlopsModel, mfu
from omnifleet_trainer.policy.folder import write_folder
from omnifleet_trainer.policy.mismatch import OnMismatch
from omnifleet_trainer.policy.optimizer import Optimizer
from omnifleet_trainer.policy.passes import needs_prev_pass
from omnifleet_trainer.policy.step import response_logprobs, train_step
from omnifleet_trainer.policy.vision import Vision


class OneRankPolicy(ABC):
    """The shared half of `Policy`. A backend sets the attributes below, and brings `_forward`, `_update`, `_state`,
    `describe`, `export`, `load`, `offload`, `onload` and `close`.

    _trainable: weights that train, by a name of the backend's. Raises OmnifleetError(INVALID_CONFIG, UNSUPPORTED).
    """

    encoder_trains: bool
    _trainable: dict[str, Parameter]
    _optimizer: Optimizer
    _vision: Vision
    _flops: FlopsModel
    _reference: dict[str, Tensor] | None

    def __init__(
        self,
        source: Path,
        *,
        trainer: TrainerConfig,
        objective: ObjectiveConfig,
        temperature: float,
        on_mismatch: OnMismatch | None,
    ) -> None:
        self._source, self._trainer, self._objective = source, trainer, objective
        self._temperature, self._on_mismatch = temperature, on_mismatch
        if temperature <= 0:
            raise invalid(
                "greedy samples have no logprobs to train on",
                knob="sampling.temperature",
                reason=Reason.INVALID_CONFIG,
            )
        if trainer.world_size != 1:
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"the {trainer.backend} backend trains on one rank, not {trainer.world_size}",
                knob="trainer.world_size",
            )
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )

    @abstractmethod
    def _forward(self, batch: StepBatch) -> Callable[[MicroBatch], Tensor]:
        """See `passes.Forward`."""

    @abstractmethod
    def _update(self) -> float:
        """See `step.Update`."""

    @abstractmethod
    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Master weights by checkpoint name, without a copy where that can be."""

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`."""
        check_batch(batch)
        micros = self._collate(batch, range(len(batch.samples)))
        return response_logprobs(micros, len(batch.samples), self._forward(batch))

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`. Besides the metrics of `objectives.metrics`: lr, grad_norm, media_* counts, train_seconds."""
        check_batch(batch)
        began, rows = time.monotonic(), range(len(batch.samples))
        size = self._trainer.batch_samples or max(len(rows), 1)
        updates = [self._collate(batch, rows[start : start + size]) for start in range(0, len(rows), size)]
        before = (self._vision.references, self._vision.encoded, self._vision.cached)
        patches_before = self._vision.patches
        metrics = train_step(
            batch,
            updates,
            objective=self._objective,
            forward=self._forward(batch),
            update=self._update,
            reference=None
            if self._reference is None
            else lambda micros: self._reference_logprobs(batch, micros),
            on_mismatch=self._on_mismatch,
        )
        metrics["lr"] = self._optimizer.learning_rate()
        self._optimizer.steps += 1
        after = (self._vision.references, self._vision.encoded, self._vision.cached)
        for name, new, old in zip(("references", "encoded", "cached"), after, before, strict=True):
            metrics[f"media_{name}"] = float(new - old)
        seconds = time.monotonic() - began
        if self._trainer.peak_tflops is not None:
            passes = needs_prev_pass(self._objective, len(updates)) + (self._reference is not None)
            patches = self._vision.patches - patches_before
            flops = self._flops.of_step(
                batch, passes=passes, patches=patches, tower_trains=self.encoder_trains
            )
            metrics["mfu"] = mfu(flops, seconds, self._trainer.peak_tflops)
        return metrics | {"train_seconds": seconds}

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        return set(self._trainable)

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`; weights are the float32 masters."""
        weights = [(name, tensor.to("cpu", copy=True)) for name, tensor in self._state()]
        write_optimizer = self._optimizer.snapshot()

        def write(folder: Path) -> None:
            write_folder(folder / "policy", weights, self._source)
            write_optimizer(folder / "optimizer")

        return write

    def save(self, folder: Path) -> None:
        """See `Policy`; streams the weights, without a copy of them all."""
        write_folder(folder / "policy", self._state(), self._source)
        self._optimizer.snapshot()(folder / "optimizer")

    def _remember_reference(self) -> None:
        """The reference policy of the KL term: the weights that the run began with, whatever is loaded later."""
        needed = self._objective.kl_coefficient > 0
        self._reference = (
            {n: p.detach().cpu().clone() for n, p in self._trainable.items()} if needed else None
        )

    def _response(self, micro: MicroBatch, logits: Tensor) -> Tensor:
        """Logprobs of columns first.., from logits [B, S - first, V] of the columns before them."""
        ids = micro.input_ids[:, micro.first :]
        return token_logprobs(logits, ids, **self._softmax(micro))

    def _softmax(self, micro: MicroBatch) -> dict[str, Any]:
        kept = None if micro.kept is None else micro.kept[:, micro.first :]
        return {"temperature": self._temperature, "kept": kept}

    def _collate(self, batch: StepBatch, rows: Sequence[int]) -> list[MicroBatch]:
        micros = collate(
            batch,
            rows,
            micro_batch_tokens=self._trainer.micro_batch_tokens,
            contract=self._vision.contract,
            advantage_clip=self._objective.advantage_clip,
        )
        return [micro.to(self._device) for micro in micros]

    def _reference_logprobs(self, batch: StepBatch, micros: Sequence[MicroBatch]) -> list[Tensor]:
        with self._reference_weights(), torch.no_grad():
            forward = self._forward(batch)
            return [forward(micro) for micro in micros]

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Inside, the model holds the weights that the run began with."""
        assert self._reference is not None
        current = {name: p.detach().clone() for name, p in self._trainable.items()}
        try:
            self._write(self._reference)
            yield
        finally:
            self._write(current)

    def _write(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in weights.items():
                self._trainable[name].copy_(value)


def start_group() -> bool:
    """A process group of one, if there is none; True if it was made here."""
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True
