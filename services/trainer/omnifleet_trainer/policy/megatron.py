"""The policy on Megatron Bridge and megatron-core: local layers, Megatron's optimiser; over ranks by data,
tensor, expert and pipeline parallelism.

Nothing here needs Transformer Engine; see compat/megatron_layers.py for what these layers cannot do. A fused weight of
Megatron holds several of the checkpoint (query, key and value): they train or stay fixed together.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.compat import megatron as compat
from omnifleet_trainer.objectives.logprobs import token_logprobs
from omnifleet_trainer.policy.families.megatron import MEGATRON_FAMILIES
from omnifleet_trainer.policy.families.megatron_nemotron import MegatronNemotron
from omnifleet_trainer.policy.families.nemotron import NemotronOmni
from omnifleet_trainer.policy.families.qwen import unknown_family
from omnifleet_trainer.policy.flops import FlopsModel
from omnifleet_trainer.policy.folder import stored
from omnifleet_trainer.policy.megatron_head import chunked_logprobs, heading
from omnifleet_trainer.policy.megatron_model import Built, build, fused_names
from omnifleet_trainer.policy.megatron_nemotron import HYBRID
from omnifleet_trainer.policy.megatron_optimizer import MegatronOptimizer
from omnifleet_trainer.policy.megatron_pipeline import Pipeline
from omnifleet_trainer.policy.megatron_replay import MegatronRouters
from omnifleet_trainer.policy.megatron_sequence import Division
from omnifleet_trainer.policy.names import checkpoint_files
from omnifleet_trainer.policy.optimizer import check_moments
from omnifleet_trainer.policy.packing import Packing
from omnifleet_trainer.policy.parked import Parked, tensors_of
from omnifleet_trainer.policy.passes import Schedule
from omnifleet_trainer.policy.rank import RankPolicy
from omnifleet_trainer.policy.recompute import recompute_layers
from omnifleet_trainer.policy.vision import Vision, layout_of

_SOUNDS = ("sound_encoder.", "sound_projection.")
_ENCODER = ("visual.", "model.visual.", "vision_model.", "mlp1.", *_SOUNDS)
_TOWER = ("model.visual.", *NemotronOmni.encoder)
"""Prefixes of names: in checkpoints, and in transformers."""


class MegatronPolicy(RankPolicy):
    """`Policy` over Megatron's own layers; a freeze pattern must not split a fused weight."""

    _optimizer: MegatronOptimizer
    _parked: Parked | None = None
    _open_groups = False

    def _check(self) -> None:
        _family(self._source)

    def _open(self, frozen: set[str]) -> None:
        self._open_groups = True
        self._packs = self._trainer.packing is not False
        parallel = self._trainer.parallel
        with compat.on_cpu():
            self._built: Built = build(
                self._source, self._shapes, frozen, parallel, getattr(torch, self._trainer.dtype)
            )
            parameters = dict(self._built.core.named_parameters())
            self._trainable = {name: p for name, p in parameters.items() if p.requires_grad}
            layers = self._built.config.get_text_config().num_hidden_layers
            self._routers = MegatronRouters(self._built.core, layers, self._peers)
            self._mixture = self._routers.mixture
            if self._trainer.recompute:
                recompute_layers(self._built.core, self._routers.again)
            self._training = self._trains_anywhere()
            self._optimizer = MegatronOptimizer(
                self._trainable,
                self._trainer.optimizer,
                self._built,
                training=self._training,
                distributed=parallel.distributed_optimizer,
            )
            if self._built.half:
                self._optimizer.load_masters(checkpoint_files(self._source))
        moved = [name for name in self._training if name.startswith(_ENCODER)]
        self.encoder_trains = bool(moved)
        self._division = Division(parallel, self._place.rank)
        self._multiple = 1 if self._packs else self._division.multiple
        if not self._division.whole:
            from omnifleet_trainer.compat.megatron_layers import attend_over

            attend_over(self._built.core.language_model, self._division.group)
        self._family = _family(self._source)(self._built.core, self._built.config)
        self._family.division = self._division
        self._vision = Vision(
            self._family,
            frozen=all(name.startswith(_SOUNDS) for name in moved),
            sounds_frozen=not any(name.startswith(_SOUNDS) for name in moved),
        )
        if self._trainer.peak_tflops is not None:
            self._flops = _flops(self._built.config, self._training)
        self._remember_reference()

    def _trains_anywhere(self) -> set[str]:
        """Checkpoint names of what trains, on this stage or another."""
        names = fused_names(self._built.read_tasks)
        parts = self._peers.everyone(sorted({source for name in self._trainable for source in names[name]}))
        if not all(parts):
            raise invalid(
                "model.freeze leaves a stage of the pipeline nothing to train: use fewer, or freeze less",
                knob="trainer.parallel.pp",
                reason=Reason.INVALID_CONFIG,
            )
        return {name for part in parts for name in part}

    def describe(self) -> dict[str, str]:
        """See `Policy`."""
        from importlib.metadata import version

        return {
            "backend": "megatron",
            "megatron_core": version("megatron-core"),
            "megatron_bridge": version("megatron-bridge"),
            "transformers": version("transformers"),
            "torch": torch.__version__,
            "device": str(self._device),
            "dtype": self._trainer.dtype,
            "model": type(self._built.core).__name__,
            "ranks": str(self._place.world),
            "parameters": str(sum(math.prod(shape) for shape in self._shapes.values())),
            "trainable_parameters": str(
                sum(math.prod(self._shapes[n]) for n in self._training if n in self._shapes)
            ),
            "encoder_trains": str(self.encoder_trains).lower(),
        }

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`."""
        with compat.on_cpu():
            return super().logprobs(batch)

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`. A batch without media still moves a tower that trains, by its momentum: see MegatronOptimizer."""
        with compat.on_cpu():
            return super().train(batch)

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`; one tensor at a time, by Bridge's weight maps, in `trainer.dtype`."""
        with torch.no_grad():
            yield from self._stored(
                self._built.bridge.export_hf_weights(
                    [self._built.model], show_progress=False, conversion_tasks=self._built.tasks
                )
            )

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        return set(self._training)

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`."""
        with compat.on_cpu():
            return super().snapshot()

    def load(self, folder: Path) -> None:
        """See `Policy`."""
        self._peers.together(lambda: self._check_stored(folder))
        with compat.on_cpu(), torch.no_grad():
            self._built.bridge.load_hf_weights([self._built.model], str(folder / "policy"))
            if self._built.half:
                self._optimizer.load_masters(checkpoint_files(folder / "policy"))
            self._optimizer.load(folder / "optimizer")
        self._vision.clear()

    def _check_stored(self, folder: Path) -> None:
        super()._check_stored(folder)
        check_moments(folder / "optimizer", self._training)

    def offload(self) -> None:
        """See `Policy`."""
        with compat.on_cpu():
            self._built.model.offload_grad_buffers()
        self._vision.clear()
        self._optimizer.move(torch.device("cpu"))
        if self._device.type == "cuda":
            self._parked = Parked(tensors_of(self._built.model))
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `Policy`."""
        if self._parked is not None:
            self._parked.restore()
        self._parked = None
        self._optimizer.move(self._device)
        with compat.on_cpu():
            self._built.model.restore_grad_buffers()

    def close(self) -> None:
        """See `Policy`."""
        parallel = sys.modules.get("megatron.core.parallel_state")
        if self._open_groups and parallel is not None:  # None: it failed before Megatron was imported
            parallel.destroy_model_parallel()
        self._open_groups = False
        super().close()

    def _schedule(self, batch: StepBatch) -> Schedule:
        if self._trainer.parallel.pp == 1:
            return super()._schedule(batch)
        return Pipeline(self._built.model, self._forward(batch))

    def _forward(self, batch: StepBatch) -> Callable[[MicroBatch], Tensor]:
        def forward(micro: MicroBatch) -> Tensor:
            arguments = self._arguments(micro, batch)
            if not self._built.core.post_process:
                packing = Packing(micro, self._division.multiple) if self._packs else None
                hidden: Tensor = self._family.hidden(arguments, packing)
                return hidden
            ids = micro.input_ids[:, micro.first :]
            kept = None if micro.kept is None else micro.kept[:, micro.first :]
            if not self._packs:
                rows = slice(micro.first - 1, -1)
                return self._headed(rows, lambda: self._family.logits(arguments), ids, kept)
            packing = Packing(micro, self._division.multiple)
            places, here = self._division.predictions(packing)
            kept = None if kept is None else packing.wanted(kept)[:, here]
            wanted = packing.wanted(ids)[:, here]
            logprobs = self._headed(
                places, lambda: self._family.packed_logits(arguments, packing), wanted, kept
            )
            return packing.padded(self._division.joined(logprobs, here))

        def replayed(micro: MicroBatch) -> Tensor:
            with self._routers.replaying(micro, packed=self._packs, division=self._division):
                return forward(micro)

        return replayed

    def _arguments(self, micro: MicroBatch, batch: StepBatch) -> dict[str, Any]:
        """Of the decoder. Media are embedded on the first stage; the others need to know where they lie."""
        if self._built.core.pre_process:
            return self._vision.arguments(micro, batch.segments)
        media = [batch.segments[key] for key in micro.media]
        received: dict[str, Any] = self._family.received(micro, layout_of(media, self._device))
        return received

    def _headed(
        self, rows: Tensor | slice, run: Callable[[], Tensor], ids: Tensor, kept: Tensor | None
    ) -> Tensor:
        """[B, T] of `ids`, which `rows` of the model's hidden states predict; run: its forward."""
        head, chunk = self._family.head, self._trainer.logprob_chunk
        if chunk is not None:
            return chunked_logprobs(head, rows, run, ids, kept, chunk=chunk, logprobs=self._logprobs)
        with heading(head, rows):
            logits = run()
        return self._logprobs(logits, ids, kept)

    def _logprobs(self, logits: Tensor, ids: Tensor, kept: Tensor | None) -> Tensor:
        """[B, T] of `ids`; of tensor-parallel ranks each has logits of its part of the vocabulary."""
        from megatron.core import tensor_parallel

        if self._trainer.parallel.tp > 1 and kept is None:
            negated: Tensor = tensor_parallel.vocab_parallel_cross_entropy(
                logits.float() / self._temperature, ids
            )
            return -negated
        if self._trainer.parallel.tp > 1:
            logits = tensor_parallel.gather_from_tensor_model_parallel_region(logits)
        return token_logprobs(logits, ids, temperature=self._temperature, kept=kept)

    def _update(self) -> float:
        norm = self._optimizer.norm()
        if math.isfinite(norm):
            self._optimizer.update()
        self._optimizer.clear()
        return norm

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._stored(self._optimizer.masters()) if self._built.half else self.export()

    def _stored(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Without a tied head, which checkpoints leave out, and with what no model holds."""
        yield from ((name, tensor.detach()) for name, tensor in tensors if name in self._shapes)
        with stored(checkpoint_files(self._source)) as read:
            yield from ((name, read(name)) for name in self._built.passive)


def _family(source: Path) -> Any:
    body = json.loads((source / "config.json").read_text())
    model_type = body.get("model_type")
    if not isinstance(model_type, str):
        raise invalid(f"{source}/config.json has no model_type", reason=Reason.INVALID_CONFIG)
    families = MEGATRON_FAMILIES | {HYBRID: MegatronNemotron}
    if model_type not in families:
        raise unknown_family(model_type, "megatron", families)
    return families[model_type]


def _flops(config: Any, training: set[str]) -> FlopsModel:
    """By the shapes of the same model in transformers, without its weights."""
    from transformers import AutoModelForImageTextToText

    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(config)
    language = any(not name.startswith(_ENCODER) for name in training)
    for name, weight in model.named_parameters():
        weight.requires_grad_(language or name.startswith(_TOWER))
    return FlopsModel.of(model, _TOWER, NemotronOmni.sound_encoder)
