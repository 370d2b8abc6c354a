"""Memory of the loss kernel: logprobs from hidden states in chunks, against logits all at once.

Each path runs in a process of its own; its peak is the growth of the resident set over what it held before (weights,
hidden states and their gradients are in neither). `python bench/trainer/loss_memory.py` (about a minute, 3 GB).
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time

import torch

from omnifleet_trainer.objectives.logprobs import hidden_logprobs

TOKENS, VOCABULARY, WIDTH = 8192, 151_936, 64
SHARED = 1024  # tokens at which both paths fit and are compared
TEMPERATURE = 0.9


def operands(tokens: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    random = torch.Generator().manual_seed(0)
    hidden = torch.randn(1, tokens, WIDTH, generator=random)
    head = torch.randn(VOCABULARY, WIDTH, generator=random) / WIDTH**0.5
    for tensor in (hidden, head):
        tensor.requires_grad_()
        tensor.grad = torch.zeros_like(tensor)
    return hidden, head, torch.randint(0, VOCABULARY, (1, tokens), generator=random)


def naive(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    logits = (hidden @ head.T).float() / TEMPERATURE
    chosen = torch.log_softmax(logits, -1).gather(-1, ids[..., None])
    return chosen[..., 0]


def chunked(hidden: torch.Tensor, head: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return hidden_logprobs(hidden, head, ids, temperature=TEMPERATURE)


PATHS = {"naive": naive, "chunked": chunked}


def measure(path: str, tokens: int) -> dict[str, float]:
    """In this process: peak growth in bytes of forward and backward, seconds, and sums that identify the results."""
    hidden, head, ids = operands(tokens)
    backward(PATHS[path](*operands(8)).sum())  # what torch sets up once
    before, began = peak(), time.perf_counter()
    values = PATHS[path](hidden, head, ids)
    backward((values * torch.linspace(-1, 1, tokens)).mean())
    seconds = time.perf_counter() - began
    assert hidden.grad is not None and head.grad is not None
    return {
        "bytes": float(peak() - before),
        "seconds": seconds,
        "values": values.double().sum().item(),
        "hidden": hidden.grad.double().norm().item(),
        "head": head.grad.double().norm().item(),
    }


def backward(loss: torch.Tensor) -> None:
    loss.backward()  # type: ignore[no-untyped-call]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def apart(path: str, tokens: int) -> dict[str, float]:
    reply = subprocess.run(
        [sys.executable, __file__, path, str(tokens)],
        check=True,
        capture_output=True,
        text=True,
        timeout=1800,
    )
    found: dict[str, float] = json.loads(reply.stdout)
    return found


def compare() -> float:
    """Largest difference of values and gradients between the paths, over the largest entry of each."""
    results = []
    for path in PATHS.values():
        hidden, head, ids = operands(SHARED)
        values = path(hidden, head, ids)
        backward(values.mean())
        results.append((values.detach(), hidden.grad, head.grad))
    return max(
        float((ours - theirs).abs().max() / theirs.abs().max())
        for theirs, ours in zip(*results, strict=True)
        if theirs is not None and ours is not None
    )


def main() -> None:
    full = TOKENS * VOCABULARY * 4
    print(f"{TOKENS} tokens, vocabulary {VOCABULARY}, float32: full logits {full / 1e9:.2f} GB")
    rows = [("chunked", TOKENS), ("chunked", SHARED), ("naive", SHARED)]
    for path, tokens in rows:
        found = apart(path, tokens)
        share = found["bytes"] / (tokens * VOCABULARY * 4)
        print(
            f"{path:8} {tokens:5} tokens: peak {found['bytes'] / 1e9:5.2f} GB = {share:5.2f} of full logits, "
            f"{found['seconds']:.1f} s"
        )
        if (path, tokens) == ("chunked", TOKENS):
            print("below a quarter:", "yes" if share < 0.25 else "NO")
    print(f"largest relative difference of values and gradients at {SHARED} tokens: {compare():.1e}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
    else:
        main()
