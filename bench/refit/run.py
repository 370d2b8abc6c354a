"""Refit, measured: `python bench/refit/run.py` on a CPU, with `--device cuda` on GPUs (two: `nccl`; one: `cuda_ipc`).

Engines of several ranks: `--device cuda --tp 2 --transport cuda_ipc` on two GPUs, with `nccl` on three.
One table. GB/s on GPUs: bytes delivered (and verified, where it says so) over the time from the first bucket to the commit;
gate: the longest time without any token of eight running requests.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import scale

RECEIVERS = (64, 512)
MODEL_BYTES, MODEL_BUCKET = 16.6e9, 256 << 20


def print_gpu(sizes: list[str], times: int, transport: str | None, tp: int) -> None:
    """Stock and ours at each size, with the ratios."""
    import gpu
    import torch

    setup = gpu.Setup(transport or ("nccl" if torch.cuda.device_count() > 1 else "cuda_ipc"), tp)
    raw, rows = asyncio.run(gpu.measure(sizes, times, setup))
    print(f"\nraw: {raw:.1f} GB/s; medians of {times}")
    print("| size | path | GB | s | GB/s | of raw | of stock | gate ms | commit ms | pack ms |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        stock = [other.rate for other in rows if other.size == row.size and other.path.startswith("stock")]
        of_stock = f"{row.rate / stock[0]:.2f}" if stock else "-"
        print(
            f"| {row.size} | {row.path} | {row.gigabytes:.4g} | {row.seconds:.4f} | {row.rate:.1f} | "
            f"{row.rate / raw:.2f} | {of_stock} | {row.gate_ms:.0f} | {row.commit_ms:.1f} | {row.pack_ms:.1f} |"
        )
    print_model(raw)


def print_cpu(times: int) -> None:
    """Transports of one host."""
    import cpu

    rows = cpu.measure(times)
    memcpy = rows[0][1]
    print("| CPU, 64 MiB | GB/s | of memcpy |\n|---|---|---|")
    for what, rate in rows:
        print(f"| {what} | {rate:.2f} | {rate / memcpy:.2f} |")
    print_model(50.0)


def print_model(link: float) -> None:
    """Seconds for many receivers by formula."""
    print(
        f"\nA model, not a measurement: {MODEL_BYTES / 1e9:.1f} GB, buckets of 256 MiB, links of {link:.0f} GB/s"
    )
    print("| receivers | chain s | tree s | 8 sharded senders, 4 ranks s |\n|---|---|---|---|")
    rate = link * 1e9
    for n in RECEIVERS:
        chain = scale.chain_s(MODEL_BYTES, MODEL_BUCKET, rate, n)
        tree = scale.tree_s(MODEL_BYTES, MODEL_BUCKET, rate, n)
        print(f"| {n} | {chain:.2f} | {tree:.2f} | {scale.sharded_s(MODEL_BYTES, rate, n, 8, 4):.2f} |")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument(
        "--sizes", nargs="+", help="default: tiny 2B 7B; with --tp, whose heads tiny lacks, 2B 7B"
    )
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument(
        "--transport", choices=["nccl", "cuda_ipc"], help="default: nccl, on one GPU cuda_ipc"
    )
    parser.add_argument("--tp", type=int, default=1, help="ranks of each engine")
    options = parser.parse_args()
    if options.device == "cuda":
        sizes = options.sizes or (["tiny"] * (options.tp == 1) + ["2B", "7B"])
        print_gpu(sizes, options.times, options.transport, options.tp)
    else:
        print_cpu(options.times)
