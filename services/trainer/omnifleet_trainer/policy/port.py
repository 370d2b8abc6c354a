"""What the loop asks of a policy. A backend is a class that satisfies `Policy`; the loop never imports one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from omnifleet_trainer.batch.samples import StepBatch

if TYPE_CHECKING:
    import torch

Tensor: TypeAlias = "torch.Tensor | npt.NDArray[Any]"
"""A torch tensor, or a numpy array from a policy that works without torch."""


class Policy(Protocol):
    """The weights of one run. Calls are blocking and not reentrant: the loop makes them from one thread."""

    encoder_trains: bool
    """True if encoder outputs depend on weights that training moves."""

    def describe(self) -> dict[str, str]:
        """Facts for status and reports: backend, versions, device, dtype, parameters, trainable parameters."""
        ...

    def logprobs(self, batch: StepBatch) -> list[npt.NDArray[np.float32]]:
        """Natural-log probabilities of each sample's response tokens under the current weights; samples in order."""
        ...

    def train(self, batch: StepBatch) -> dict[str, float]:
        """One step: micro-batches, loss, backward, clipping and one or more optimiser updates. Returns metrics.

        Raises OmnifleetError(INVALID_REQUEST) for a sample that does not fit the batch's contract; nothing is then
        changed.
        """
        ...

    def export(self) -> Iterator[tuple[str, Tensor]]:
        """All weights by Hugging Face name, one at a time, full tensors in the dtype that engines load.

        A tensor is valid until the next one is asked for.
        """
        ...

    def trainable_names(self) -> set[str]:
        """Hugging Face names of the weights that training moves."""
        ...

    def snapshot(self) -> Callable[[Path], None]:
        """Copy weights, optimiser and random state to host memory; the result writes them as `save` does.

        The result may be called on another thread, while training goes on.
        """
        ...

    def save(self, folder: Path) -> None:
        """Write `folder/policy` (what transformers and vLLM load) and `folder/optimizer`."""
        ...

    def load(self, folder: Path) -> None:
        """Restore what `save` wrote. Raises OmnifleetError(CORRUPT) if it does not fit this policy."""
        ...

    def offload(self) -> None:
        """Free the accelerator: weights and optimiser state go to host memory."""
        ...

    def onload(self) -> None:
        """Undo `offload`."""
        ...

    def close(self) -> None:
        """Free everything, process groups included. Idempotent."""
        ...
