"""The policy on nemo-automodel: float32 master weights, AdamW; on several ranks spread over them by FSDP2.

At world size 1 AutoModel leaves FSDP2 out, and with it the mixed-precision policy: bfloat16 compute is autocast here,
on any number of ranks. The model stays in eval mode throughout, so that no dropout separates the logprobs of two passes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.objectives.logprobs import hidden_logprobs
from omnifleet_trainer.policy.automodel_model import build
from omnifleet_trainer.policy.expert_parallel import EXPERTS, check_expert_parallel
from omnifleet_trainer.policy.families.registry import family_of, needs_filling
from omnifleet_trainer.policy.flops import FlopsModel
from omnifleet_trainer.policy.folder import stored
from omnifleet_trainer.policy.head import PlainHead, plain_head
from omnifleet_trainer.policy.held import held_by
from omnifleet_trainer.policy.lora import Adapters, write_adapters
from omnifleet_trainer.policy.names import checkpoint_files
from omnifleet_trainer.policy.optimizer import Optimizer
from omnifleet_trainer.policy.rank import RankPolicy
from omnifleet_trainer.policy.recompute import recompute_layers
from omnifleet_trainer.policy.replay import Routers
from omnifleet_trainer.policy.sharded import enter, make_enterable
from omnifleet_trainer.policy.shards import own, spread, whole
from omnifleet_trainer.policy.tensor_plan import check_tensor_parallel
from omnifleet_trainer.policy.vision import Vision


class AutoModelPolicy(RankPolicy):
    """`Policy` over the model class of transformers."""

    def _check(self) -> None:
        parallel = self._trainer.parallel
        if parallel.tp > 1:
            check_tensor_parallel(self._source, parallel.tp)
        if parallel.ep > 1:
            check_expert_parallel(self._source, parallel.ep)

    def _open(self, frozen: set[str]) -> None:
        source, shapes, place, trainer = self._source, self._shapes, self._place, self._trainer
        fills = place.world > 1 and needs_filling(source)
        self._model, self._mesh, self._experts_mesh = build(source, trainer, empty=fills)
        self._routers = Routers(self._model, self._model.config)
        self._mixture = self._routers.mixture
        if trainer.recompute:
            recompute_layers(self._model, self._routers.again)
        if place.world > 1:
            make_enterable(self._model)
        self._family = family_of(self._model)
        self._held = held_by(
            self._model, shapes, fixed=tuple(self._family.fixed), passive=self._family.passive
        )
        self._passive = sorted(set(shapes) - self._held.all_sources(self._held.names))
        if fills:
            self._fill(source)
        parameters = dict(self._model.named_parameters())
        self._adapters = (
            None if trainer.lora is None else Adapters(self._model, trainer.lora, seed=self._seed)
        )
        known = [name for name in parameters if name in self._held]
        trains = set(known) - self._held.frozen(known, frozen)
        if self._adapters is not None:
            trains = set(self._adapters.parameters)
        for name, parameter in parameters.items():
            parameter.requires_grad_(name in trains)
        self._trainable = {name: p for name, p in parameters.items() if name in trains}
        self._optimizer = Optimizer(
            self._trainable,
            trainer.optimizer,
            held=self._held if self._adapters is None else None,
            foreach=None if trainer.parallel.tp * trainer.parallel.ep == 1 else False,
        )
        sounds = self._family.sound_encoder
        moved = [name for name in trains if name.startswith(self._family.encoder)]
        self.encoder_trains = bool(moved)
        self._vision = Vision(
            self._family,
            frozen=all(name.startswith(sounds) for name in moved),
            sounds_frozen=not any(name.startswith(sounds) for name in moved),
            anywhere=self._peers.any if place.world > 1 else None,
        )
        self._chunk = trainer.logprob_chunk or 0
        self._head = enter(self._model, lambda: plain_head(self._model)) if self._chunk else None
        self._flops = FlopsModel.of(self._model, self._family.encoder, sounds)
        self._remember_reference()

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
            "ranks": str(self._place.world),
            "parameters": str(sum(p.numel() for p in self._model.parameters())),
            "trainable_parameters": str(sum(p.numel() for p in self._trainable.values())),
            "encoder_trains": str(self.encoder_trains).lower(),
        }

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`; the dtype is `trainer.dtype`, of what is no weight its own. Of spread weights one is whole at a
        time, on every rank."""
        dtype = getattr(torch, self._trainer.dtype)
        weights = self._held.all_sources(n for n, _ in self._model.named_parameters() if n in self._held)
        for name, tensor in self._state():
            yield name, tensor.to(dtype) if name in weights else tensor

    def trainable_names(self) -> set[str]:
        """See `Policy`; with adapters, the weights that they are added to."""
        adapters = self._adapters
        if adapters is None:
            return self._held.all_sources(self._trainable)
        return self._held.all_sources(name for name in self._held.names if adapters.adapts(name))

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`; adapters are written beside what they are added to."""
        write = super().snapshot()
        if self._adapters is None:
            return write
        adapters = self._adapters.copied()

        def write_both(folder: Path) -> None:
            write(folder)
            if self._place.rank == 0:
                write_adapters(folder, adapters)

        return write_both

    def save(self, folder: Path) -> None:
        """See `Policy`."""
        super().save(folder)
        if self._adapters is not None and self._peers.alone:
            write_adapters(folder, self._adapters.copied())

    def load(self, folder: Path) -> None:
        """See `Policy`."""
        self._peers.together(lambda: self._load(folder))

    def _load(self, folder: Path) -> None:
        self._check_stored(folder)
        self._drop_whole_copies()
        if self._adapters is not None:
            self._adapters.load(folder)
        if self._adapters is None:
            self._fill(folder / "policy")
        self._optimizer.load(folder / "optimizer")
        self._vision.clear()

    def _fill(self, folder: Path) -> None:
        """Give the model the weights of a checkpoint folder, a tensor at a time."""
        fixed = self._family.fixed.items()
        with torch.no_grad(), stored(checkpoint_files(folder)) as read:
            for name, tensor in self._model.state_dict().items():
                if name in self._held:
                    own(tensor).copy_(own(spread(self._held.rebuilt(name, read), tensor)))
                    continue
                for value in (value for pattern, value in fixed if fnmatchcase(name, pattern)):
                    own(tensor).fill_(value)

    def offload(self) -> None:
        """See `Policy`."""
        self._move(torch.device("cpu"))
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    def onload(self) -> None:
        """See `Policy`."""
        self._move(self._device)

    def _forward(self, batch: StepBatch) -> Callable[[MicroBatch], Tensor]:
        def forward(micro: MicroBatch) -> Tensor:
            wanted = torch.arange(micro.first - 1, micro.input_ids.shape[1] - 1, device=self._device)
            half = self._trainer.dtype == "bfloat16"
            autocast = torch.autocast(self._device.type, torch.bfloat16, enabled=half)
            with autocast, self._routers.replaying(micro):
                arguments = self._vision.arguments(micro, batch.segments)
                if self._head is not None:
                    return self._chunked(self._head, arguments, micro)
                logits = self._family.logits(arguments, wanted)
            return self._response(micro, logits)

        return lambda micro: enter(self._model, lambda: forward(micro))

    def _chunked(self, head: PlainHead, arguments: dict[str, Any], micro: MicroBatch) -> Tensor:
        hidden = self._family.body(**arguments, use_cache=False).last_hidden_state
        return enter(
            head.module,
            lambda: hidden_logprobs(
                hidden[:, micro.first - 1 : -1],
                head.weight,
                micro.input_ids[:, micro.first :],
                chunk=self._chunk,
                **self._softmax(micro),
            ),
        )

    def _update(self) -> float:
        from nemo_automodel.components.distributed.tp_replicas import synchronize_tp_replica_gradients
        from nemo_automodel.components.training.utils import scale_grads_and_clip_grad_norm

        parallel = self._trainer.parallel
        if parallel.tp > 1:
            synchronize_tp_replica_gradients([self._model], self._mesh)
        norm = float(
            scale_grads_and_clip_grad_norm(
                self._trainer.optimizer.grad_clip,
                [self._model],
                device_mesh=self._mesh,
                moe_mesh=self._experts_mesh,
                ep_axis_name=EXPERTS if parallel.ep > 1 else None,
                dp_group_size=parallel.dp,
                foreach=parallel.tp * parallel.ep == 1,  # tensors of several meshes are not one list
            )
        )
        if np.isfinite(norm):
            self._optimizer.update()
        self._optimizer.clear()
        return norm

    def _state(self) -> Iterator[tuple[str, Tensor]]:
        state, adapters = self._model.state_dict(), self._adapters

        def merged(name: str) -> Tensor:
            weight = state[name].detach()
            return whole(weight) if adapters is None else adapters.merged(name, weight)

        yield from self._held.collected((name for name in state if name in self._held), merged)
        with stored(checkpoint_files(self._source)) as read:
            yield from ((name, read(name)) for name in self._passive)

    def _write(self, weights: dict[str, Tensor]) -> None:
        self._drop_whole_copies()
        super()._write(weights)

    def _drop_whole_copies(self) -> None:
        """FSDP2 keeps some units whole from a forward to the next backward; what is then written to their shards goes unseen."""
        for module in self._model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def _move(self, device: torch.device) -> None:
        self._drop_whole_copies()
        self._model.to(device)
        self._vision.clear()
        self._optimizer.move(device)
