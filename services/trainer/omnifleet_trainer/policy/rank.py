"""What every backend does alike on one rank, alone or of many: steps, passes, metrics, checkpoints. A backend adds the
model. All ranks of a world make the same calls in the same order; see world.py.
"""

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
from torch._C._distributed_c10d import Store
from torch.nn import Parameter

from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.batch.collate import MicroBatch, collate, idle
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.batch.shares import reply_lengths, shares, updates_of
from omnifleet_trainer.objectives.logprobs import token_logprobs
from omnifleet_trainer.policy.flops import FlopsModel, mfu
from omnifleet_trainer.policy.folder import finish_folder, write_folder, write_shards
from omnifleet_trainer.policy.group import ALONE, Place, start_group
from omnifleet_trainer.policy.job import Job
from omnifleet_trainer.policy.mismatch import OnMismatch
from omnifleet_trainer.policy.names import checkpoint_shapes, matching
from omnifleet_trainer.policy.optimizer import Optimizer
from omnifleet_trainer.policy.passes import OneByOne, Schedule, needs_prev_pass
from omnifleet_trainer.policy.peers import Peers
from omnifleet_trainer.policy.replay import Mixture
from omnifleet_trainer.policy.shards import Kept, own
from omnifleet_trainer.policy.step import response_logprobs, train_step
from omnifleet_trainer.policy.vision import Vision

_COUNTS = ("references", "encoded", "cached")


class RankPolicy(ABC):
    """The shared half of `Policy`, over a Hugging Face checkpoint folder. A backend sets the attributes below, and brings
    what is abstract.

    place, store: of a rank of a world, see `start_group`. Raises OmnifleetError(INVALID_CONFIG, UNSUPPORTED, MODEL_MISSING)
    before anything is loaded where it can.

    _trainable: weights that train, by a name of the backend's.
    """

    encoder_trains: bool
    _trainable: dict[str, Parameter]
    _optimizer: Optimizer
    _vision: Vision
    _flops: FlopsModel
    _reference: dict[str, Tensor] | None
    _mixture: Mixture
    _packs = False
    """Whether a micro-batch is bounded by its tokens alone, not by its padded ones."""
    _multiple = 1
    """What the padded length of a micro-batch is made a multiple of."""

    def __init__(
        self,
        job: Job,
        place: Place = ALONE,
        store: Store | None = None,
        on_mismatch: OnMismatch | None = None,
    ) -> None:
        self._source, self._trainer, self._objective = job.source, job.trainer, job.objective
        self._temperature, self._seed, self._on_mismatch = job.temperature, job.seed, on_mismatch
        if job.temperature <= 0:
            raise invalid(
                "greedy samples have no logprobs to train on",
                knob="sampling.temperature",
                reason=Reason.INVALID_CONFIG,
            )
        self._place, parallel = place, job.trainer.parallel
        place.take_threads(job.trainer.threads)
        self._device = place.device()
        self._shapes = checkpoint_shapes(job.source)
        self._check()
        frozen = matching(self._shapes, job.freeze)
        torch.manual_seed(job.seed)
        self._owns_group = start_group(place, store)
        self._peers = Peers(
            index=parallel.data_rank(place.rank),
            size=parallel.dp,
            stride=parallel.together,
            stages=parallel.pp,
        )
        try:
            self._open(frozen)
        except BaseException:
            self.close()
            raise

    @abstractmethod
    def _check(self) -> None:
        """Refuse what this backend cannot do, before anything is loaded."""

    @abstractmethod
    def _open(self, frozen: set[str]) -> None:
        """Load the model. frozen: names of the checkpoint. A rank of a world meets the others in it."""

    @abstractmethod
    def describe(self) -> dict[str, str]:
        """See `Policy`; so below."""

    @abstractmethod
    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights; every rank iterates, to the end."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore a checkpoint, of however many ranks."""

    @abstractmethod
    def offload(self) -> None:
        """To the host."""

    @abstractmethod
    def onload(self) -> None:
        """Back."""

    @abstractmethod
    def _forward(self, batch: StepBatch) -> Callable[[MicroBatch], Tensor]:
        """See `passes.Forward`. Of a model that is spread over stages, this rank's part of it."""

    @abstractmethod
    def _update(self) -> float:
        """See `step.Update`."""

    @abstractmethod
    def _state(self) -> Iterator[tuple[str, Tensor]]:
        """Master weights by checkpoint name, without a copy where that can be."""

    def close(self) -> None:
        """Free everything."""
        if hasattr(self, "_vision"):  # else it failed while it opened
            self._vision.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`. Every rank returns those of all samples."""
        dealt = shares(batch, range(len(batch.samples)), self._peers.size)
        (micros,) = self._prepared(batch, [dealt[self._peers.index]])
        replies = response_logprobs(micros, len(batch.samples), self._schedule(batch))
        if self._peers.alone:
            return replies
        mine = [np.zeros(0, np.float32), *(replies[row] for row in dealt[self._peers.index])]
        for rows, values in zip(dealt, self._peers.arrays(np.concatenate(mine)), strict=True):
            cuts = np.cumsum(reply_lengths(batch.samples, rows))[:-1]
            for row, reply in zip(rows, np.split(values, cuts) if rows else [], strict=True):
                replies[row] = reply
        return replies

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`. Besides the metrics of `objectives.metrics`: lr, grad_norm, media_* counts, train_seconds."""
        began = time.monotonic()
        rows = [
            shares(batch, update, self._peers.size)[self._peers.index]
            for update in updates_of(batch, self._trainer.batch_samples)
        ]
        updates = self._prepared(batch, rows)
        before = (self._vision.references, self._vision.encoded, self._vision.cached)
        patches_before = self._vision.patches
        metrics = train_step(
            batch,
            updates,
            objective=self._objective,
            schedule=self._schedule(batch),
            update=self._update,
            reference=None
            if self._reference is None
            else lambda micros: self._reference_logprobs(batch, micros),
            peers=self._peers,
            on_mismatch=self._on_mismatch,
        )
        metrics["lr"] = self._optimizer.learning_rate()
        self._optimizer.steps += 1
        after = (self._vision.references, self._vision.encoded, self._vision.cached)
        done = [float(new - old) for new, old in zip(after, before, strict=True)]
        *counts, patches = self._peers.total([*done, float(self._vision.patches - patches_before)])
        metrics |= {f"media_{name}": value for name, value in zip(_COUNTS, counts, strict=True)}
        seconds = time.monotonic() - began
        if self._trainer.peak_tflops is not None:
            passes = needs_prev_pass(self._objective, len(updates)) + (self._reference is not None)
            flops = self._flops.of_step(
                batch, passes=passes, patches=int(patches), tower_trains=self.encoder_trains
            )
            peak = self._trainer.peak_tflops * self._place.world
            metrics["mfu"] = mfu(flops, seconds, peak)
        return metrics | {"train_seconds": seconds}

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        return set(self._trainable)

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`; weights are the float32 masters.

        Of many ranks each copies, and writes, its share of the tensors, whole: the first rank makes one folder of them
        (`finish_folder`), which any number of ranks loads.
        """
        kept = Kept(self._place.rank, self._place.world)
        weights = [(name, value) for name, tensor in self._state() if (value := kept(tensor)) is not None]
        write_optimizer = self._optimizer.snapshot(kept)

        def write(folder: Path) -> None:
            write_shards(folder / "policy", weights, rank=self._place.rank)
            write_optimizer(folder / "optimizer")
            if self._place.world == 1:  # of many, the one that all ranks have answered does it
                finish_folder(folder / "policy", self._source)

        return write

    def save(self, folder: Path) -> None:
        """See `Policy`; on one rank it streams the weights, without a copy of them all."""
        if self._peers.alone:
            write_folder(folder / "policy", self._state(), self._source)
            self._optimizer.snapshot()(folder / "optimizer")
        else:
            self.snapshot()(folder)

    def _check_stored(self, folder: Path) -> None:
        """Whether a checkpoint is of this model. Raises OmnifleetError(CORRUPT)."""
        if checkpoint_shapes(folder / "policy") != self._shapes:
            raise OmnifleetError(
                Reason.CORRUPT, f"{folder} holds other weights than {self._source}", knob="model.path"
            )

    def _schedule(self, batch: StepBatch) -> Schedule:
        return OneByOne(self._forward(batch))

    def _remember_reference(self) -> None:
        """The reference policy of the KL term: the weights that the run began with, whatever is loaded later."""
        needed = self._objective.kl_coefficient > 0
        self._reference = (
            {n: own(p.detach()).cpu().clone() for n, p in self._trainable.items()} if needed else None
        )

    def _response(self, micro: MicroBatch, logits: Tensor) -> Tensor:
        """Logprobs of columns first.., from logits [B, S - first, V] of the columns before them."""
        ids = micro.input_ids[:, micro.first :]
        return token_logprobs(logits, ids, **self._softmax(micro))

    def _softmax(self, micro: MicroBatch) -> dict[str, Any]:
        kept = None if micro.kept is None else micro.kept[:, micro.first :]
        return {"temperature": self._temperature, "kept": kept}

    def _prepared(self, batch: StepBatch, parts: Sequence[Sequence[int]]) -> list[list[MicroBatch]]:
        """Micro-batches of each part of this rank's rows; of each part every rank gets as many.

        Raises OmnifleetError(INVALID_REQUEST), on all ranks alike.
        """

        def prepare() -> list[list[MicroBatch]]:
            check_batch(batch, [row for rows in parts for row in rows])
            return [self._collate(batch, rows) for rows in parts]

        micros = self._peers.together(prepare)
        for part in micros if not self._peers.alone else ():
            part += [idle(self._device, self._multiple)] * (self._peers.most(len(part)) - len(part))
        return micros

    def _collate(self, batch: StepBatch, rows: Sequence[int]) -> list[MicroBatch]:
        micros = collate(
            batch,
            rows,
            micro_batch_tokens=self._trainer.micro_batch_tokens,
            contract=self._vision.contract,
            multiple=self._multiple,
            advantage_clip=self._objective.advantage_clip,
            packed=self._packs,
            cached=self._vision.frozen,
        )
        self._mixture.check(micros)
        return [micro.to(self._device) for micro in micros]

    def _reference_logprobs(self, batch: StepBatch, micros: Sequence[MicroBatch]) -> list[Tensor]:
        with self._reference_weights():
            return self._schedule(batch).look(micros)

    @contextlib.contextmanager
    def _reference_weights(self) -> Iterator[None]:
        """Inside, the model holds the weights that the run began with."""
        assert self._reference is not None
        current = {name: own(p.detach()).clone() for name, p in self._trainable.items()}
        try:
            self._write(self._reference)
            yield
        finally:
            self._write(current)

    def _write(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, value in weights.items():
                own(self._trainable[name]).copy_(value)
