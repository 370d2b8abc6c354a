"""LoRA (2106.09685) on AutoModel's adapters: W + (alpha / rank) B A, of which A and B train alone.

Engines get the sums, by the checkpoint's names; a checkpoint holds the sums for whoever serves it, and the adapters to
go on from.
"""

from __future__ import annotations

import difflib
import hashlib
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import Parameter

from omnifleet.config.recipe import LoraConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet_trainer.policy.shards import own, spread, whole

_FILE = "adapter/adapter.safetensors"
_PARTS = (".lora_A.weight", ".lora_B.weight")


def adapters_of(config: LoraConfig) -> Any:
    """What AutoModel is told to build."""
    from nemo_automodel.components._peft.lora import PeftConfig

    return PeftConfig(
        target_modules=list(config.targets), dim=config.rank, alpha=config.alpha, use_triton=False
    )


def is_adapter(name: str) -> bool:
    """Whether a parameter of the model is one of an adapter."""
    return name.endswith(_PARTS)


class Adapters:
    """The adapters of a model, spread over ranks or not. parameters: by the model's names."""

    def __init__(self, model: Any, config: LoraConfig, *, seed: int) -> None:
        """Start them where W is: B = 0, A normal with the variance of 1 / columns, alike on any number of ranks.

        Raises OmnifleetError(INVALID_CONFIG) for a target that matches nothing.
        """
        self._scale = config.alpha / config.rank
        self.parameters: dict[str, Parameter] = {
            name: p for name, p in model.named_parameters() if is_adapter(name)
        }
        self.targets = sorted(
            name.removesuffix(_PARTS[0]) for name in self.parameters if name.endswith(_PARTS[0])
        )
        self._check(config, [name for name, module in model.named_modules() if hasattr(module, "weight")])
        for name, parameter in self.parameters.items():
            start = torch.zeros(parameter.shape)
            if name.endswith(_PARTS[0]):
                digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=7).digest()
                random = torch.Generator().manual_seed(int.from_bytes(digest, "little"))
                start = torch.randn(parameter.shape, generator=random) / parameter.shape[1] ** 0.5
            self._put(name, start)

    def merged(self, name: str, weight: Tensor) -> Tensor:
        """The whole weight `name` of the model with its adapter; collective if it is spread."""
        target = name.removesuffix(".weight")
        full = whole(weight)
        if not self.adapts(name):
            return full
        a, b = (whole(self.parameters[target + part].detach()) for part in _PARTS)
        return full + self._scale * (b @ a).to(full.dtype)

    def adapts(self, name: str) -> bool:
        """Whether the weight has an adapter."""
        return name.removesuffix(".weight") + _PARTS[0] in self.parameters

    def copied(self) -> dict[str, Tensor]:
        """Whole adapters on the host; collective."""
        return {
            name: whole(p.detach()).to("cpu", copy=True).contiguous() for name, p in self.parameters.items()
        }

    def load(self, folder: Path) -> None:
        """Restore what `write` wrote. Raises OmnifleetError(CORRUPT) if it is of other adapters."""
        try:
            stored = load_file(folder / _FILE)
        except (OSError, SafetensorError) as error:
            raise OmnifleetError(
                Reason.CORRUPT, f"{folder} holds no adapters: {error}", knob="trainer.lora"
            ) from error
        if {name: t.shape for name, t in stored.items()} != {
            name: p.shape for name, p in self.parameters.items()
        }:
            raise OmnifleetError(Reason.CORRUPT, f"{folder} holds other adapters", knob="trainer.lora")
        for name, tensor in stored.items():
            self._put(name, tensor)

    def _put(self, name: str, full: Tensor) -> None:
        parameter = self.parameters[name].detach()
        own(parameter).copy_(own(spread(full, parameter)))

    def _check(self, config: LoraConfig, known: list[str]) -> None:
        for pattern in config.targets:
            if not any(fnmatchcase(target, pattern) for target in self.targets):
                near = ", ".join(difflib.get_close_matches(pattern, known, n=6, cutoff=0.0))
                raise invalid(
                    f"trainer.lora.targets pattern {pattern!r} matches no linear layer; near it: {near}",
                    knob="trainer.lora.targets",
                    reason=Reason.INVALID_CONFIG,
                )


def write_adapters(folder: Path, adapters: Mapping[str, Tensor]) -> None:
    """Beside `policy/` and `optimizer/` of a checkpoint."""
    (folder / _FILE).parent.mkdir(parents=True, exist_ok=True)
    save_file(dict(adapters), folder / _FILE)
