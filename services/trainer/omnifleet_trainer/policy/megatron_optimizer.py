"""Megatron's optimiser behind the schedule and the files of `Optimizer`.

Its state on disk is by the checkpoint's names, as the other backend's: Bridge's weight maps carry moments like weights.
So it moves between backends, and between numbers of ranks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from torch import Tensor
from torch.nn import Parameter

from omnifleet.config.recipe import OptimizerConfig
from omnifleet_trainer.policy.megatron_model import Built, held_by
from omnifleet_trainer.policy.optimizer import MOMENTS, Optimizer, check_moments, write_moments
from omnifleet_trainer.policy.shards import Kept

_MASTER = "master"


class MegatronOptimizer(Optimizer):
    """AdamW as megatron-core builds it, over the gradient buffers of a wrapped model.

    Clips by the norm over all weights. Weight decay goes to every weight, as in the other backend; Megatron itself
    would spare biases and norms. A weight without a gradient in an update has one of zero here, so its momentum still
    moves it; torch's AdamW leaves it alone. Call inside `compat.on_cpu()`. weights: this rank's; training: checkpoint
    names of what trains on any rank. distributed: state is spread over the data-parallel ranks.
    Where weights are bfloat16 AdamW moves float32 ones of its own, the masters, and the weights are these, rounded.
    """

    def __init__(
        self,
        weights: Mapping[str, Parameter],
        config: OptimizerConfig,
        built: Built,
        *,
        training: set[str],
        distributed: bool,
    ) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self._built, self._model, self._distributed = built, built.model, distributed
        self._megatron = get_megatron_optimizer(
            MegatronConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.grad_clip,
                use_distributed_optimizer=distributed,
                use_precision_aware_optimizer=False,
                bf16=built.half,
                params_dtype=torch.bfloat16 if built.half else torch.float32,
            ),
            [built.model],
        )
        self._chained = list(self._megatron.chained_optimizers)  # of dense weights, and of experts
        self._training = training
        super().__init__(weights, config, adam=self._chained[0].optimizer)
        self.clear()

    def norm(self) -> float:
        """Norm of the gradients that are there, before clipping."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._model], None)
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm())

    def update(self) -> None:
        """Clip, and one AdamW update; clears the gradients."""
        self._prepare()
        self._megatron.step()
        self.clear()

    def clear(self) -> None:
        """Set gradients to zero."""
        self._model.zero_grad_buffer()
        self._megatron.zero_grad()

    def snapshot(self, kept: Kept | None = None) -> Callable[[Path], None]:
        """See `Optimizer`. Collective: the ranks make each moment whole together."""
        kept = kept or Kept()
        tasks = [task for task in self._built.float_tasks if self._trains(task)]
        tensors: dict[str, Tensor] = {}
        held = [name for task in tasks for name in self._built.exported_by(task)]
        updates = {name: self._updates() for name in held} if self._began() else {}
        for moment in MOMENTS if updates else ():
            for name, tensor in self._exported(moment, tasks):
                if name in updates and (copy := kept(tensor)) is not None:
                    tensors[f"{moment}/{name}"] = copy
        body = json.dumps({"kind": "adamw", "steps": self.steps, "updates": updates}, sort_keys=True)
        return lambda folder: write_moments(folder, tensors, body, kept)

    def load(self, folder: Path) -> None:
        """See `Optimizer`."""
        held = [self._built.exported_by(task) for task in self._built.tasks if self._trains(task)]
        body = check_moments(folder, {name for names in held for name in names})
        for chained in self._chained:
            chained.optimizer.state.clear()
        for moment in MOMENTS if body["updates"] else ():
            stored = Stored(sorted(folder.glob("moments*.safetensors")), f"{moment}/")
            for task, value in self._read(stored):
                self._set(task.param_weight, moment, value, body["updates"][held_by(task)[0]])
        self.steps = int(body["steps"])

    def masters(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by checkpoint names, whole, in float32. Collective."""
        yield from self._exported(_MASTER, list(self._built.float_tasks))

    def load_masters(self, files: Sequence[Path]) -> None:
        """Set the masters to the weights in safetensors `files`, of which the model holds the rounded ones already."""
        for task, value in self._read(Stored(files, "")):
            for part, place in self._parts(task.param_weight):
                if part.dtype == torch.float32:
                    part.detach().copy_(value.reshape(-1)[place].reshape(part.shape))

    def _read(self, stored: Stored) -> Iterator[tuple[Any, Tensor]]:
        """Task of each weight of this rank that is stored, and its part of what is stored, in float32."""
        for task in self._built.read_tasks:
            if task.megatron_module is None or any(name not in stored for name in held_by(task)):
                continue
            found = self._built.bridge._model_bridge.maybe_modify_loaded_hf_weight(
                task.mapping.hf_param, stored
            )
            with _as_float(task.megatron_module, task.param_weight):
                value = task.mapping.hf_to_megatron(found, task.megatron_module)
            yield task, value.float()

    def move(self, device: torch.device) -> None:
        """See `Optimizer`. What is a view of the model's own memory moves with the model."""
        for chained in self._chained:
            for group in chained.optimizer.param_groups if self._built.half else ():
                for part in group["params"]:
                    part.data = part.data.to(device)
            for state in chained.optimizer.state.values():
                for moment in MOMENTS:
                    state[moment] = state[moment].to(device)

    def _prepare(self) -> None:
        for chained in self._chained:
            for group in chained.optimizer.param_groups:
                group["lr"], group["weight_decay"] = self.learning_rate(), self._config.weight_decay

    def _trains(self, task: Any) -> bool:
        """Whether the weight trains; alike on every rank, though it may be on one of them only."""
        return all(name in self._training for name in held_by(task))

    def _began(self) -> bool:
        return any(chained.optimizer.state for chained in self._chained)

    def _updates(self) -> float:
        """AdamW updates so far; every weight has been in all of them."""
        steps = [float(state["step"]) for one in self._chained for state in one.optimizer.state.values()]
        return max(steps, default=0.0)

    def _exported(self, moment: str, tasks: list[Any]) -> Iterator[tuple[str, Tensor]]:
        """A moment of all weights by checkpoint names, whole."""
        with torch.no_grad():
            yield from self._built.bridge.export_hf_weights(
                [self._model],
                show_progress=False,
                conversion_tasks=(  # one at a time: a moment is only as long in memory as it takes to send it
                    dataclasses.replace(task, param_weight=self._whole(task.param_weight, moment))
                    for task in tasks
                ),
            )

    def _whole(self, weight: Parameter | None, moment: str) -> Tensor | None:
        """This rank's moment of a weight, in the weight's shape; made of the parts of all data-parallel ranks."""
        if weight is None:
            return None
        flat = torch.zeros(weight.numel(), dtype=torch.float32, device=weight.device)
        for part, place in self._parts(weight):
            value = part.detach() if moment == _MASTER else (self._state_of(part) or {}).get(moment)
            if value is not None:
                flat[place] = value.reshape(-1)
        if self._distributed and weight.requires_grad:
            dist.all_reduce(flat, group=_data_group(weight))
        return flat.view(weight.shape)

    def _set(self, weight: Parameter, moment: str, value: Tensor, updates: float) -> None:
        for part, place in self._parts(weight):
            for chained in self._chained:
                if any(part is held for group in chained.optimizer.param_groups for held in group["params"]):
                    state = chained.optimizer.state.setdefault(part, {"step": torch.tensor(updates)})
                    state[moment] = value.reshape(-1)[place].reshape(part.shape).to(part).clone()

    def _parts(self, weight: Parameter) -> Iterator[tuple[Tensor, slice]]:
        """What AdamW sees of a weight here, and its place in the flat weight: all of it, or this rank's range."""
        if not self._distributed or not weight.requires_grad:
            yield getattr(weight, "main_param", weight), slice(None)
            return
        for chained in self._chained:
            if weight in chained.model_param_gbuf_map:
                place = chained._get_model_param_range_map(weight)["param"]
                group, order = chained.model_param_group_index_map[weight]
                yield chained.optimizer.param_groups[group]["params"][order], slice(place.start, place.end)

    def _state_of(self, part: Tensor) -> dict[str, Any] | None:
        for chained in self._chained:
            if part in chained.optimizer.state:
                state: dict[str, Any] = chained.optimizer.state[part]
                return state
        return None


class Stored(Mapping[str, Tensor]):
    """Tensors of safetensors files whose names begin with `prefix`, by the rest of it; each read when it is asked for."""

    def __init__(self, files: Sequence[Path], prefix: str) -> None:
        self._prefix = prefix
        self._files: dict[str, Path] = {}
        for path in files:
            with safe_open(path, "pt") as stored:
                for key in stored.keys():  # noqa: SIM118
                    if key.startswith(prefix):
                        self._files[key.removeprefix(prefix)] = path

    def __getitem__(self, name: str) -> Tensor:
        with safe_open(self._files[name], "pt") as stored:
            tensor: Tensor = stored.get_tensor(self._prefix + name)
            return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@contextlib.contextmanager
def _as_float(module: Any, weight: Parameter) -> Iterator[None]:
    """Bridge rounds what it reads to the dtype of the weight that it is for: inside, a float32 one is in its place."""
    stand_in = Parameter(weight.detach().float(), requires_grad=False)
    stand_in.__dict__.update(weight.__dict__)
    names = [name for name, held in module._parameters.items() if held is weight]
    module._parameters.update(dict.fromkeys(names, stand_in))
    try:
        yield
    finally:
        module._parameters.update(dict.fromkeys(names, weight))


def _data_group(weight: Parameter) -> Any:
    from megatron.core import parallel_state

    if getattr(weight, "allreduce", True):
        return parallel_state.get_data_parallel_group(with_context_parallel=True)
    return parallel_state.get_expert_data_parallel_group()
