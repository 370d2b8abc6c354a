"""nemo-automodel on a CPU.

Checked with nemo-automodel 0.7.0. Its model builder asks `torch.cuda.current_device()` for the device to build on,
whatever the process group's backend is; without CUDA that raises "Torch not compiled with CUDA enabled". The name
`torch` in that one module is rebound to a view of torch whose current CUDA device is the CPU. All else in the package
follows the backend of the default process group. Its LoRA kernels, which no CPU runs, do not import with triton 3.9
("key contains names that are not kernel arguments"): triton is hidden while that one module loads, which the module
takes as "not installed". Nothing is done where CUDA is present.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import types
from typing import Any

from omnifleet.errors import OmnifleetError, Reason

VERSIONS = ("0.7.",)
_KERNELS = "nemo_automodel.components._peft.lora_kernel"
_BUILDER = "nemo_automodel._transformers.auto_model"


def install() -> bool:
    """Make AutoModel build on the CPU; True if anything was changed.

    Call before the first model is built. Raises OmnifleetError(UNSUPPORTED) for a version that was not checked.
    """
    import torch

    if torch.cuda.is_available():
        return False
    version = importlib.metadata.version("nemo-automodel")
    if not version.startswith(VERSIONS):
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"nemo-automodel {version} was not checked on CPU; install {' or '.join(v + 'x' for v in VERSIONS)}",
        )
    # Compiling small functions costs a tiny model 10 to 26 s in its first step.
    os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
    _import_without_triton(_KERNELS)
    builder = importlib.import_module(_BUILDER)
    if not isinstance(builder.torch, _CpuTorch):
        builder.torch = _CpuTorch(torch)  # type: ignore[attr-defined]
    return True


def _import_without_triton(module: str) -> None:
    present = sys.modules.get("triton")
    sys.modules["triton"] = None  # type: ignore[assignment]
    try:
        importlib.import_module(module)
    finally:
        del sys.modules["triton"]
        if present is not None:
            sys.modules["triton"] = present


class _CpuTorch(types.ModuleType):
    """torch, but "cuda" is the CPU."""

    def __init__(self, torch: Any) -> None:
        super().__init__("torch")
        self._torch, self.cuda = torch, _CpuCuda(torch)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch, name)

    def device(self, *args: Any, **kwargs: Any) -> Any:
        if args and isinstance(args[0], str) and args[0].startswith("cuda"):
            return self._torch.device("cpu")
        return self._torch.device(*args, **kwargs)


class _CpuCuda:
    """torch.cuda, but the current device is the CPU."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch

    def __getattr__(self, name: str) -> Any:
        return getattr(self._torch.cuda, name)

    def current_device(self) -> Any:
        return self._torch.device("cpu")
