"""The worker with a vLLM engine that is measured, in a process of its own, the weights that it is sent, and a line of results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from sizes import write_size

HERE = Path(__file__).parent
DEVICE = torch.device("cuda", 0)
ENGINE = {
    "dtype": "bfloat16",
    "max_model_len": 2048,
    "max_num_seqs": 16,
    "gpu_memory_utilization": 0.3,
    "enforce_eager": True,
    "threads": 4,
}
KV_BYTES = {"tiny": 1 << 30, "2B": 4 << 30, "7B": 4 << 30}


@dataclass(frozen=True)
class Setup:
    """transport: nccl or cuda_ipc. tp: ranks of each engine."""

    transport: str
    tp: int = 1

    def __post_init__(self) -> None:
        wanted, there = self.tp + (self.transport == "nccl"), torch.cuda.device_count()
        if there < wanted:
            raise SystemExit(
                f"--transport {self.transport} --tp {self.tp} wants {wanted} GPUs, here are {there}"
            )

    @property
    def gpus(self) -> list[int]:
        """Of the engines."""
        last = torch.cuda.device_count() if self.transport == "nccl" else self.tp
        return list(range(last - self.tp, last))


@dataclass
class Row:
    """One line of the table, medians. rate: GB/s, bytes over seconds from the first bucket to the commit."""

    size: str
    path: str
    gigabytes: float
    seconds: float
    gate_ms: float
    commit_ms: float = float("nan")
    pack_ms: float = float("nan")
    note: str = ""

    @property
    def rate(self) -> float:
        """GB/s."""
        return self.gigabytes / self.seconds


@dataclass
class Child:
    """A worker process."""

    size: str
    shapes: dict[str, tuple[int, ...]]
    process: subprocess.Popen[bytes]
    answers: Any
    log: Path
    address: str = ""
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    def read(self) -> dict[str, Any]:
        """The next answer. Raises RuntimeError with the log if the worker ended."""
        line = self.answers.readline()
        if not line:
            raise RuntimeError(f"the {self.size} worker ended:\n" + self.log.read_text()[-5000:])
        answer: dict[str, Any] = json.loads(line)
        return answer

    def order(self, do: str, **fields: Any) -> None:
        """Give an order; see `worker.Orders`."""
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"do": do, **fields}) + "\n").encode())
        self.process.stdin.flush()

    def gap(self) -> float:
        """Seconds of the longest gap between tokens since the last call."""
        self.order("gap")
        return float(self.read()["gap"])


@contextmanager
def worker(size: str, folder: Path, setup: Setup) -> Iterator[Child]:
    model = folder / size
    model.mkdir(parents=True)
    shapes = write_size(size, model)
    read, write = os.pipe()
    log = folder / f"{size}.log"
    engine = json.dumps({**ENGINE, "kv_cache_memory_bytes": KV_BYTES[size], "tensor_parallel_size": setup.tp})
    env = dict(
        os.environ,
        CUDA_VISIBLE_DEVICES=",".join(map(str, setup.gpus)),
        OMNIFLEET_REFIT_UNVERIFIED="1",
        VLLM_USE_FLASHINFER_SAMPLER="0",
        NCCL_NVLS_ENABLE="0",
    )
    command = [sys.executable, str(HERE / "worker.py"), str(model), engine, str(write)]
    with log.open("wb") as errors:
        process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=errors, stderr=errors, pass_fds=[write]
        )
    os.close(write)
    with os.fdopen(read) as answers:
        try:
            yield Child(size, shapes, process, answers, log)
        finally:
            process.kill()
            process.wait(30)


def change(child: Child, step: int) -> None:
    """New bytes in every tensor."""
    generator = torch.Generator(DEVICE).manual_seed(step)
    for name, shape in child.shapes.items():
        weight = child.weights.setdefault(name, torch.empty(shape, dtype=torch.bfloat16, device=DEVICE))
        weight.normal_(0, 0.02, generator=generator)
    torch.cuda.synchronize(DEVICE)
