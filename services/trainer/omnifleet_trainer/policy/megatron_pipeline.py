"""Micro-batches through a model whose layers are spread over stages, in megatron-core's order: one forward, one backward
(2104.04473), so that a stage keeps at most as many micro-batches as there are stages after it.

The first stage holds the tower and the embedding, the last one the head: it alone knows logprobs, computes the loss, and
tells the others. Of what passes between stages the shape is told too, so micro-batches may be of any length.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.policy.passes import Forward, Loss


class Pipeline:
    """`Schedule` over stages. model: this stage, wrapped for gradients.

    stage: this stage's part of `Forward`; of all but the last it gives hidden states, contiguous, [S, B, H]. Call inside
    `compat.on_cpu()`.
    """

    def __init__(self, model: Any, stage: Forward) -> None:
        self._model, self._stage = model, stage

    def look(self, micros: Sequence[MicroBatch]) -> list[Tensor]:
        """See `Schedule`."""
        with torch.no_grad():
            return self._run(micros, None)

    def learn(self, micros: Sequence[MicroBatch], loss: Loss) -> list[Tensor]:
        """See `Schedule`."""
        return self._run(micros, loss)

    def _run(self, micros: Sequence[MicroBatch], loss: Loss | None) -> list[Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not micros:
            return []
        found: list[Tensor] = []

        def end(i: int, logprobs: Tensor) -> tuple[Tensor, dict[str, Any]]:
            """On the last stage. The schedule divides by the number of micro-batches."""
            found.append(logprobs.detach())
            return logprobs.sum() if loss is None else loss(i, logprobs) * len(micros), {}

        def step(numbers: Iterator[int], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
            i = next(numbers)
            return self._stage(micros[i]), partial(end, i)

        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=iter(range(len(micros))),
            model=[self._model],
            num_microbatches=len(micros),
            seq_length=1,  # shapes are told
            micro_batch_size=1,
            forward_only=loss is None,
        )
        return _told(found, micros)


def _told(found: list[Tensor], micros: Sequence[MicroBatch]) -> list[Tensor]:
    """The last stage's logprobs, on every stage."""
    from megatron.core import parallel_state

    shapes = [(len(micro.lengths), micro.input_ids.shape[1] - micro.first) for micro in micros]
    sizes = [rows * columns for rows, columns in shapes]
    device = micros[0].input_ids.device
    flat = torch.cat([one.reshape(-1).float() for one in found]) if found else torch.empty(sum(sizes))
    flat = flat.to(device)
    last = parallel_state.get_pipeline_model_parallel_last_rank()
    dist.broadcast(flat, src=last, group=parallel_state.get_pipeline_model_parallel_group())
    return [part.view(shape) for part, shape in zip(torch.split(flat, sizes), shapes, strict=True)]
