"""A policy that computes nothing but keeps every promise of the port; for tests of what is around it. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
from safetensors.numpy import load_file

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.batch.check import check_batch
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.port import Tensor

_WIDTH = 8
_FILE = "fake-policy.json"


class FakePolicy:
    """Weights: one float a step, so equal histories give equal weights. Logprobs: those of the generation.

    trained: ids of the trajectories that were trained, step by step, for tests that count them.
    """

    encoder_trains = False

    def __init__(self, model: Path | None = None) -> None:
        """model: checkpoint folder whose tensor names and shapes `export` keeps; None = three small tensors."""
        self._model = model
        self.weights: list[float] = []
        self.trained: list[list[str]] = []

    def describe(self) -> dict[str, str]:
        """See `Policy`."""
        return {"backend": "fake", "steps": str(len(self.weights)), "parameters": str(3 * _WIDTH)}

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """See `Policy`."""
        check_batch(batch)
        return [np.asarray(sample.generation_logprobs, np.float32) for sample in batch.samples]

    def train(self, batch: StepBatch) -> dict[str, float]:
        """See `Policy`; the new weight is the mean of advantage x tokens."""
        check_batch(batch)
        count = max(len(batch.samples), 1)
        moved = math.fsum(sample.advantage * sum(sample.mask) for sample in batch.samples) / count
        self.weights.append(moved)
        self.trained.append([sample.trajectory_id for sample in batch.samples])
        tokens = [lag for sample in batch.samples for lag in sample.lag]
        return {
            "loss": -moved,
            "reward": math.fsum(sample.reward for sample in batch.samples) / count,
            "token_mult_prob_error": 1.0,
            "gen_kl_error": 0.0,
            "probs_ratio": 1.0,
            "grad_norm": abs(moved),
            "lr": 0.0,
            "global_valid_toks": float(len(tokens)),
            "global_valid_seqs": float(len(batch.samples)),
            "num_valid_samples": float(len(batch.samples)),
            "lag_mean": sum(tokens) / max(len(tokens), 1),
            "lag_max": float(max(tokens, default=0)),
            "updates": 1.0,
        }

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """See `Policy`."""
        total = math.fsum(self.weights)
        if self._model is not None:
            yield from self._export_like(self._model, np.float32(len(self.weights)))
            return
        yield "model.embed_tokens.weight", np.full(_WIDTH, 1.0, np.float32)
        yield "model.layers.0.mlp.weight", np.full(_WIDTH, total, np.float32)
        yield "lm_head.weight", np.arange(_WIDTH, dtype=np.float32) + np.float32(len(self.weights))

    def trainable_names(self) -> set[str]:
        """See `Policy`."""
        if self._model is not None:
            return {min(name for name, _ in self.export())}
        return {"model.layers.0.mlp.weight", "lm_head.weight"}

    def _export_like(self, model: Path, moved: np.float32) -> Iterator[tuple[str, Tensor]]:
        """The checkpoint's tensors; the first by name carries how often the policy was trained."""
        tensors = {k: v for file in sorted(model.glob("*.safetensors")) for k, v in load_file(file).items()}
        first = min(tensors)
        yield from (
            (name, tensors[name] + moved if name == first else tensors[name]) for name in sorted(tensors)
        )

    def snapshot(self) -> Callable[[Path], None]:
        """See `Policy`."""
        body = json.dumps({"weights": self.weights, "trained": self.trained})

        def write(folder: Path) -> None:
            for part in ("policy", "optimizer"):
                (folder / part).mkdir(parents=True, exist_ok=True)
                (folder / part / _FILE).write_text(body)

        return write

    def save(self, folder: Path) -> None:
        """See `Policy`; both folders hold one JSON file."""
        self.snapshot()(folder)

    def load(self, folder: Path) -> None:
        """See `Policy`."""
        try:
            body = json.loads((folder / "policy" / _FILE).read_text())
            self.weights, self.trained = list(body["weights"]), list(body["trained"])
        except (OSError, ValueError, KeyError) as error:
            raise OmnifleetError(Reason.CORRUPT, f"{folder} holds no fake policy: {error}") from error

    def offload(self) -> None:
        """See `Policy`."""

    def onload(self) -> None:
        """See `Policy`."""

    def close(self) -> None:
        """See `Policy`."""
