"""AdamW with linear warm-up, and its state on disk without pickle."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import Parameter

from omnifleet.config.recipe import OptimizerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.folder import stored
from omnifleet_trainer.policy.held import Held
from omnifleet_trainer.policy.shards import Kept, spread, whole

MOMENTS = ("exp_avg", "exp_avg_sq")


class Optimizer:
    """AdamW over named float32 weights. The learning rate follows training steps, not optimiser updates (NeMo RL)."""

    def __init__(
        self,
        weights: Mapping[str, Parameter],
        config: OptimizerConfig,
        *,
        adam: torch.optim.Optimizer | None = None,
        held: Held | None = None,
        foreach: bool | None = None,
    ) -> None:
        """adam: an AdamW over the same weights, if a library has built one. held: how the tensors that the state is stored
        by lie in `weights`; None = one in each, of the same name. foreach: False where weights lie on several meshes."""
        self._weights, self._config, self._held = dict(weights), config, held
        self._adam = adam or torch.optim.AdamW(
            list(self._weights.values()),
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            weight_decay=config.weight_decay,
            foreach=foreach,
        )
        self.steps = 0
        """Training steps that ended."""

    def learning_rate(self) -> float:
        """Of the step that comes: from warmup_start x lr linearly to lr over warmup_steps, then constant."""
        warmup, start = self._config.warmup_steps, self._config.warmup_start
        done = min(self.steps / warmup, 1.0) if warmup else 1.0
        return self._config.lr * (start + (1 - start) * done)

    def update(self) -> None:
        """One AdamW update from the gradients that are there; clears them."""
        self._prepare()
        self._adam.step()
        self.clear()

    def _prepare(self) -> None:
        for group in self._adam.param_groups:
            group["lr"], group["weight_decay"] = self.learning_rate(), self._config.weight_decay

    def clear(self) -> None:
        """Drop gradients."""
        self._adam.zero_grad(set_to_none=True)

    def snapshot(self, kept: Kept | None = None) -> Callable[[Path], None]:
        """Copy the state to host memory; the result writes it, on any thread: moments.safetensors and optimizer.json.

        kept: which of the moments this rank copies, into a file of its own; default: all.
        """
        kept = kept or Kept()
        tensors: dict[str, Tensor] = {}
        states = {
            name: state for name, weight in self._weights.items() if (state := self._adam.state.get(weight))
        }
        for moment in MOMENTS:
            for name, tensor in self._collected(states, moment):
                if (copy := kept(tensor)) is not None:
                    tensors[f"{moment}/{name}"] = copy
        updates = {
            source: float(state["step"]) for name, state in states.items() for source in self._sources(name)
        }
        body = json.dumps({"kind": "adamw", "steps": self.steps, "updates": updates}, sort_keys=True)
        return lambda folder: write_moments(folder, tensors, body, kept)

    def load(self, folder: Path) -> None:
        """Restore what `snapshot` wrote, on however many ranks. Raises OmnifleetError(CORRUPT) if it is of other weights."""
        body = check_moments(folder, {source for name in self._weights for source in self._sources(name)})
        updates = body["updates"]
        self._adam.state.clear()
        with stored(moment_files(folder)) as read:
            for name, weight in self._weights.items():
                if not any(source in updates for source in self._sources(name)):
                    continue
                state = {"step": torch.tensor(updates[self._sources(name)[0]])}
                for moment in MOMENTS:
                    tensor = self._rebuilt(name, partial(_moment, read, moment))
                    if tensor.shape != weight.shape:
                        raise OmnifleetError(
                            Reason.CORRUPT, f"{folder} has optimiser state of another shape for {name}"
                        )
                    state[moment] = spread(tensor, weight.detach())
                self._adam.state[weight] = state
        self.steps = int(body["steps"])

    def _sources(self, name: str) -> list[str]:
        return [name] if self._held is None else self._held.sources(name)

    def _collected(self, states: Mapping[str, Any], moment: str) -> Iterator[tuple[str, Tensor]]:
        if self._held is None:
            return ((name, state[moment]) for name, state in states.items())
        return self._held.collected(states, lambda name: whole(states[name][moment]))

    def _rebuilt(self, name: str, read: Callable[[str], Tensor]) -> Tensor:
        return read(name) if self._held is None else self._held.rebuilt(name, read)

    def move(self, device: torch.device) -> None:
        """Carry the state to `device`; the step counters stay on the host, where AdamW wants them."""
        for state in self._adam.state.values():
            for moment in MOMENTS:
                state[moment] = state[moment].to(device)


def write_moments(folder: Path, tensors: dict[str, Tensor], body: str, kept: Kept) -> None:
    """One rank's moments ("exp_avg/NAME"), and by the first rank what is said of them."""
    folder.mkdir(parents=True, exist_ok=True)
    own = "" if kept.world == 1 else f"-{kept.rank:05d}"
    save_file(tensors, folder / f"moments{own}.safetensors")
    if kept.rank == 0:
        (folder / "optimizer.json").write_text(body)


def check_moments(folder: Path, known: set[str]) -> dict[str, Any]:
    """What is said of the moments in a folder. Raises OmnifleetError(CORRUPT) if they are of weights that are not `known`."""
    body: dict[str, Any] = json.loads((folder / "optimizer.json").read_text())
    unknown = sorted(set(body["updates"]) - known)
    if unknown:
        raise OmnifleetError(
            Reason.CORRUPT,
            f"{folder} has optimiser state of weights that do not train here: {unknown[:4]}",
            knob="model.freeze",
        )
    return body


def _moment(read: Callable[[str], Tensor], moment: str, name: str) -> Tensor:
    try:
        return read(f"{moment}/{name}")
    except KeyError:
        raise OmnifleetError(Reason.CORRUPT, f"the optimiser's state lacks {moment} of {name}") from None


def moment_files(folder: Path) -> list[Path]:
    """What the ranks have written, however many they were."""
    return sorted(folder.glob("moments*.safetensors"))
