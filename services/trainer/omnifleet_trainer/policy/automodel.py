"""The policy on nemo-automodel: one rank, float32 master weights, AdamW.

At world size 1 AutoModel leaves FSDP2 out, and with it the mixed-precision policy: bfloat16 compute is autocast here.
The model stays in eval mode throughout, so that no dropout separates the logprobs of two passes.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig, TrainerConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.batch.collate import MicroBatch, collate
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.compat import automodel as compat
from omnifleet_trainer.objectives.logprobs import hidden_logprobs, token_logprobs
from omnifleet_trainer.policy.flops import FlopsModel, mfu
from omnifleet_trainer.policy.folder import read_folder, write_folder
from omnifleet_trainer.policy.head import plain_head
from omnifleet_trainer.policy.mismatch import OnMismatch
from omnifleet_trainer.policy.names import checkpoint_shapes, matching, source_names
from omnifleet_trainer.policy.optimizer import Optimizer
from omnifleet_trainer.policy.passes import needs_prev_pass
from omnifleet_trainer.policy.step import response_logprobs, train_step
from omnifleet_trainer.policy.vision import Vision, media_contract

_ENCODER = ("model.visual.", "visual.")


class AutoModelPolicy:
    """`Policy` over a Hugging Face checkpoint folder.

    temperature: the one that generation logprobs were taken at (1 for raw ones). freeze: glob patterns over
    checkpoint names. Raises OmnifleetError(INVALID_CONFIG, UNSUPPORTED, MODEL_MISSING) before anything is loaded
    where it can.
    """

    def __init__(
        self,
        source: Path,
        *,
        trainer: TrainerConfig,
        objective: ObjectiveConfig,
        temperature: float = 1.0,
        freeze: Sequence[str] = (),
        seed: int = 0,
        feature_cache_bytes: int = 1 << 30,
        on_mismatch: OnMismatch | None = None,
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
                f"the automodel backend trains on one rank, not {trainer.world_size}",
                knob="trainer.world_size",
            )
        shapes = checkpoint_shapes(source)
        frozen = matching(shapes, freeze)
        if trainer.threads is not None:
            torch.set_num_threads(trainer.threads)
        torch.manual_seed(seed)
        self._device = (
            torch.device("cuda", torch.cuda.current_device())
            if torch.cuda.is_available()
            else torch.device("cpu")
        )
        self._owns_group = _start_group()
        self._model, self._mesh = _build(source)
        self._names = source_names(self._model, shapes)
        parameters = dict(self._model.named_parameters())
        for name, parameter in parameters.items():
            parameter.requires_grad_(self._names[name] not in frozen)
        trainable = {self._names[name]: p for name, p in parameters.items() if p.requires_grad}
        self._trainable = trainable
        self._optimizer = Optimizer(trainable, trainer.optimizer)
        self.encoder_trains = any(p.requires_grad for name, p in parameters.items() if _is_encoder(name))
        self._vision = Vision(
            self._model,
            media_contract(self._model.config),
            frozen=not self.encoder_trains,
            cache_bytes=feature_cache_bytes,
        )
        self._chunk = trainer.logprob_chunk or 0
        self._head = plain_head(self._model) if self._chunk else None
        self._flops = FlopsModel.of(self._model, _ENCODER)
        # The reference policy of the KL term: the weights that the run began with, whatever is loaded later.
        needs_reference = objective.kl_coefficient > 0
        self._reference = (
            {n: p.detach().cpu().clone() for n, p in trainable.items()} if needs_reference else None
        )

    def describe(self) -> dict[str, str]:
        """See `Policy`."""
        import nemo_automodel
        import transformers

        return {
            "backend": "automodel",
            "nemo_automodel": str(nemo_automodel.__version__),
            "transformers": transformers.__version__,
            "torch": torch.__version__,
            "device": str(self._device),
            "dtype": self._trainer.dtype,
            "model": type(self._model).__name__,
            "parameters": str(sum(p.numel() for p in self._model.parameters())),
            "trainable_parameters": str(sum(p.numel() for p in self._trainable.values())),
            "encoder_trains": str(self.encoder_trains).lower(),
        }

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

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`; the dtype is `trainer.dtype`."""
        dtype = getattr(torch, self._trainer.dtype)
        for name, tensor in self._state():
            yield name, tensor.to(dtype) if tensor.is_floating_point() else tensor

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

    def load(self, folder: Path) -> None:
        """See `Policy`."""
        state = {
            self._names[name]: tensor
            for name, tensor in self._model.state_dict().items()
            if name in self._names
        }
        stored = checkpoint_shapes(folder / "policy")
        if {name: tuple(tensor.shape) for name, tensor in state.items()} != stored:
            raise OmnifleetError(
                Reason.CORRUPT, f"{folder} holds other weights than {self._source}", knob="model.path"
            )
        with torch.no_grad():
            for name, tensor in read_folder(folder / "policy"):
                state[name].copy_(tensor)
        self._optimizer.load(folder / "optimizer")
        self._vision.clear()

    def offload(self) -> None:
        """See `Policy`."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `Policy`."""
        self._move(self._device)

    def close(self) -> None:
        """See `Policy`."""
        self._vision.clear()
        if self._owns_group and dist.is_initialized():
            dist.destroy_process_group()
        self._owns_group = False

    def _collate(self, batch: StepBatch, rows: Sequence[int]) -> list[MicroBatch]:
        micros = collate(
            batch,
            rows,
            micro_batch_tokens=self._trainer.micro_batch_tokens,
            contract=self._vision.contract,
            advantage_clip=self._objective.advantage_clip,
        )
        return [micro.to(self._device) for micro in micros]

    def _forward(self, batch: StepBatch) -> Callable[[MicroBatch], Tensor]:
        def forward(micro: MicroBatch) -> Tensor:
            ids = micro.input_ids[:, micro.first :]
            kept = None if micro.kept is None else micro.kept[:, micro.first :]
            settings: dict[str, Any] = {"temperature": self._temperature, "kept": kept}
            wanted = torch.arange(micro.first - 1, micro.input_ids.shape[1] - 1, device=self._device)
            half = self._trainer.dtype == "bfloat16"
            with torch.autocast(self._device.type, torch.bfloat16, enabled=half):
                arguments = self._vision.arguments(micro, batch.segments)
                if self._head is not None:
                    hidden = self._head.body(**arguments, use_cache=False).last_hidden_state
                    return hidden_logprobs(
                        hidden[:, micro.first - 1 : -1], self._head.weight, ids, chunk=self._chunk, **settings
                    )
                logits = self._model(**arguments, logits_to_keep=wanted, use_cache=False).logits
            return token_logprobs(logits, ids, **settings)

        return forward

    def _update(self) -> float:
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        norm = float(
            scale_grads_and_clip_grad_norm(
                self._trainer.optimizer.grad_clip,
                [self._model],
                device_mesh=self._mesh.device_mesh,
                moe_mesh=self._mesh.moe_mesh,
                dp_group_size=dist.get_world_size(),
            )
        )
        if np.isfinite(norm):
            self._optimizer.update()
        self._optimizer.clear()
        return norm

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

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in self._model.state_dict().items():
            if name in self._names:
                yield self._names[name], tensor.detach()

    def _move(self, device: torch.device) -> None:
        self._model.to(device)
        self._vision.clear()
        self._optimizer.move(device)


def _is_encoder(name: str) -> bool:
    return name.startswith(_ENCODER)


def _start_group() -> bool:
    """A process group of one, if there is none; True if it was made here."""
    if dist.is_initialized():
        return False
    backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    return True


def _build(source: Path) -> tuple[Any, Any]:
    compat.install()
    from nemo_automodel import NeMoAutoModelForImageTextToText
    from nemo_automodel.components.distributed.config import DistributedSetup, FSDP2Config
    from nemo_automodel.components.distributed.mesh import ParallelismSizes

    setup = DistributedSetup.build(strategy=FSDP2Config(), parallelism_sizes=ParallelismSizes())
    model = NeMoAutoModelForImageTextToText.from_pretrained(
        str(source),
        dtype=torch.float32,
        attn_implementation="sdpa",
        use_liger_kernel=False,
        force_hf=True,
        distributed_setup=setup,
    )
    return model.eval(), setup.mesh_context
