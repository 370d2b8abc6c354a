"""megatron-bridge and megatron-core without Transformer Engine, without triton, and on a CPU.

Checked with megatron-bridge 0.6.2 and megatron-core 0.19.2. Four seams, each a no-op where the real thing is present:

- Python 3.11 has no `typing.override`; both libraries use it. It is taken from typing_extensions.
- `megatron.bridge.peft.lora_layers` imports Transformer Engine for `isinstance` alone. A stand-in is in `sys.modules`
  while that one module loads; megatron-core's own probes for Transformer Engine still find none.
- megatron-core imports triton at module level in kernels that no CPU runs, and Mamba's kernels. Stand-ins are there while
  they load; Mamba's compute.
- megatron-core asks `torch.cuda` for the current device, streams and events, writes `device="cuda"` in places, and
  brings the experts' counts of tokens to the host. Inside `on_cpu()`, and only there, these mean the CPU.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.abc
import importlib.machinery
import importlib.metadata
import importlib.util
import sys
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.compat import mamba

VERSIONS = {"megatron-core": "0.19.", "megatron-bridge": "0.6."}
_LORA = "megatron.bridge.peft.lora_layers"
_DISPATCHER = "megatron.core.transformer.moe.token_dispatcher"
_KERNELS = (
    "megatron.core.pipeline_parallel",
    "megatron.core.models.gpt",
    "megatron.core.models.hybrid",
    "megatron.core.ssm.mamba_mixer",
)
_TRITON = ("triton", "triton.language", "triton.language.extra", "triton.runtime", "triton.compiler")


def install() -> None:
    """Make `import megatron.bridge` work here. Call before it is imported; idempotent.

    Raises OmnifleetError(UNSUPPORTED) if either library is missing, or of a version that was not checked.
    """
    for name, wanted in VERSIONS.items():
        try:
            version = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            version = "(none)"
        if not version.startswith(wanted):
            raise OmnifleetError(
                Reason.UNSUPPORTED,
                f"the megatron backend was checked with {name} {wanted}x, here is {version}",
                knob="trainer.backend",
            )
    if not hasattr(typing, "override"):
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    if not any(isinstance(finder, _LoraFinder) for finder in sys.meta_path) and not has_engine():
        sys.meta_path.insert(0, _LoraFinder())
    if absent := kernels_absent():
        _import_with(absent)


def has_engine() -> bool:
    """Whether Transformer Engine is here."""
    return importlib.util.find_spec("transformer_engine") is not None


@contextlib.contextmanager
def standing_in(modules: Mapping[str, types.ModuleType]) -> Iterator[None]:
    """`modules` are in sys.modules inside; what was there before is there again after."""
    before = {name: sys.modules.get(name) for name in modules}
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in before.items():
            sys.modules.pop(name, None)
            if module is not None:
                sys.modules[name] = module


class _LoraFinder(importlib.abc.MetaPathFinder):
    """Loads one module with a stand-in for Transformer Engine around it."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _LORA:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: types.ModuleType) -> None:
            with standing_in(_engine()):
                load(module)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def _engine() -> dict[str, types.ModuleType]:
    """Classes that nothing is an instance of."""
    engine, layers = types.ModuleType("transformer_engine"), types.ModuleType("transformer_engine.pytorch")
    for name in ("Linear", "LayerNormLinear", "GroupedLinear", "TransformerLayer"):
        setattr(layers, name, type(name, (), {}))
    layers.ops = types.SimpleNamespace(Sequential=type("Sequential", (), {}))  # type: ignore[attr-defined]
    engine.pytorch = layers  # type: ignore[attr-defined]
    return {engine.__name__: engine, layers.__name__: layers}


class _Triton(types.ModuleType):
    """Decorators that leave functions as they are; any other name is an empty class. Nothing of it runs."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__path__ = []
        self.__version__ = "0.0.0"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("jit", "autotune", "heuristics"):
            return _undecorated
        return type(
            name, (), {"__init__": lambda *_, **__: None, "__class_getitem__": classmethod(lambda c, _: c)}
        )


def _undecorated(*args: Any, **settings: Any) -> Any:
    return args[0] if args and callable(args[0]) and not settings else lambda function: function


def kernels_absent() -> dict[str, types.ModuleType]:
    """Stand-ins by name for those of triton's and Mamba's modules that are not installed; either can be without the other."""
    modules = mamba.stand_ins()
    if importlib.util.find_spec("triton") is not None:
        return modules
    modules |= {name: _Triton(name) for name in _TRITON}
    for name in _TRITON[1:]:
        parent, leaf = name.rsplit(".", 1)
        modules[parent].__dict__[leaf] = modules[name]
    return modules


def _import_with(modules: Mapping[str, types.ModuleType]) -> None:
    # These probe for triton themselves, and must find that there is none.
    for name in ("torch._inductor.runtime.triton_compat", "transformers"):
        importlib.import_module(name)
    with standing_in(modules):
        for name in _KERNELS:
            importlib.import_module(name)


def no_random_streams() -> None:
    """Between layers that are divided by sequence megatron-core changes to a random stream of the device, which a CPU has not;
    nothing here draws from it. Its tracker for inference changes nothing."""
    from megatron.core.tensor_parallel.random import initialize_rng_tracker

    initialize_rng_tracker(inference_rng_tracker=True, force_reset=True)


@contextlib.contextmanager
def on_cpu() -> Iterator[None]:
    """Inside, "cuda" is the CPU for the calling thread's torch functions and for `torch.cuda`'s device and streams.

    Does nothing where CUDA is present. Not reentrant.
    """
    import torch

    if torch.cuda.is_available():
        yield
        return
    names = {
        "current_device": lambda: torch.device("cpu"),
        "set_device": lambda *_: None,
        "synchronize": lambda *_: None,
        "empty_cache": lambda: None,
        "Stream": _Stream,
        "Event": _Stream,
        "current_stream": lambda *_: _Stream(),
        "stream": lambda *_: contextlib.nullcontext(),
    }
    before = {name: getattr(torch.cuda, name) for name in names}
    dispatcher: Any = sys.modules.get(
        _DISPATCHER
    )  # None while the first model is built: nothing is routed yet
    moved = getattr(dispatcher, "maybe_move_tensor_to_cpu", None)
    ranges = (torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop)
    for name, value in names.items():
        setattr(torch.cuda, name, value)
    if dispatcher is not None:
        dispatcher.maybe_move_tensor_to_cpu = _on_the_host
    torch.cuda.nvtx.range_push = lambda *_: None
    torch.cuda.nvtx.range_pop = lambda: None
    try:
        with _cuda_is_cpu():
            yield
    finally:
        for name, value in before.items():
            setattr(torch.cuda, name, value)
        if dispatcher is not None:
            dispatcher.maybe_move_tensor_to_cpu = moved
        torch.cuda.nvtx.range_push, torch.cuda.nvtx.range_pop = ranges


def _cuda_is_cpu() -> contextlib.AbstractContextManager[Any]:
    import torch
    from torch.overrides import TorchFunctionMode

    class Mode(TorchFunctionMode):
        def __torch_function__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            settings = dict(kwargs or {})
            if str(settings.get("device", "")).startswith("cuda"):
                settings["device"] = torch.device("cpu")
            if func is torch.Tensor.cuda:
                return args[0]
            if func is torch.Tensor.type and len(args) == 1 and not settings:
                # The optimisers compare with "torch.cuda.FloatTensor".
                return func(*args).replace("torch.", "torch.cuda.", 1)
            return func(*args, **settings)

    return Mode()


def _on_the_host(tensor: Any, as_numpy: bool = False, record_stream: bool = False) -> Any:
    """What the dispatcher of experts does with counts of tokens, which are on the host already."""
    return tensor.numpy() if as_numpy and hasattr(tensor, "numpy") else tensor


class _Stream:
    """A stream, or an event, of a device that does one thing after another."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, *_: Any) -> None:
        """Nothing to wait for; so below."""

    wait_event = synchronize = wait = record = wait_stream

    def record_event(self, *_: Any) -> _Stream:
        """An event that has happened."""
        return self
