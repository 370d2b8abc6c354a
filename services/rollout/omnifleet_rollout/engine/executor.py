"""Where the model runs: inside vLLM's EngineCore process, forked from ours after the imports, and gone when we are.

vLLM's CPU platform wants its `mp` executor and spawned children, so that three processes import vLLM one after another.
Time to a started engine with a tiny Qwen2-VL (vLLM 0.32, two busy cores), CPU time, and memory (PSS) of all processes:

    mp executor, spawn      34 s   25 s CPU   1605 MB
    this one, spawn         21 s   17 s CPU   1168 MB
    this one, fork          11 s   10 s CPU    925 MB    <- ours on CPU

`distributed_executor_backend` takes an executor's import path: a public seam. The fork is safe because nothing of ours
runs threads before it: the front end does no parallel arithmetic, and gRPC starts after the engine. An engine that is
started beside other threads is spawned.
"""

from __future__ import annotations

import ctypes
import os
import signal
from typing import Any

import torch
from vllm.v1.executor.multiproc_executor import MultiprocExecutor
from vllm.v1.executor.uniproc_executor import UniProcExecutor

THREADS_ENV = "OMNIFLEET_ENGINE_THREADS"
_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
    """Linux: SIGKILL for this process when its parent ends, however it ends. No orphan keeps ports or memory."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() == 1:
        os._exit(1)  # the parent was gone before we asked


class InProcess(UniProcExecutor):  # type: ignore[misc]
    """One model in the EngineCore process."""

    def _init_executor(self) -> None:
        die_with_parent()
        torch.set_num_threads(int(os.environ[THREADS_ENV]))  # vLLM's CPU worker forbids it later
        super()._init_executor()


class Tensors(MultiprocExecutor):  # type: ignore[misc]
    """Tensor parallel: one process a GPU, as vLLM does it; they watch EngineCore, EngineCore watches us."""

    def _init_executor(self, *args: Any) -> None:
        die_with_parent()
        super()._init_executor(*args)
