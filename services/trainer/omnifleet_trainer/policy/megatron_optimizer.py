"""Megatron's optimiser behind the schedule and the files of `Optimizer`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.nn import Parameter

from omnifleet.config.recipe import OptimizerConfig
from omnifleet_trainer.policy.optimizer import Optimizer


class MegatronOptimizer(Optimizer):
    """AdamW as megatron-core builds it, over the gradient buffers of a wrapped model.

    Clips by the norm over all weights. Weight decay goes to every weight, as in the other backend; Megatron itself
    would spare biases and norms. A weight without a gradient in an update has one of zero here, so its momentum still
    moves it; torch's AdamW leaves it alone. Call all but `snapshot` and `load` inside `compat.on_cpu()`.
    """

    def __init__(self, weights: Mapping[str, Parameter], config: OptimizerConfig, model: Any) -> None:
        from megatron.core.optimizer import OptimizerConfig as MegatronConfig
        from megatron.core.optimizer import get_megatron_optimizer

        self._model = model
        self._megatron = get_megatron_optimizer(
            MegatronConfig(
                optimizer="adam",
                lr=config.lr,
                weight_decay=config.weight_decay,
                adam_beta1=config.betas[0],
                adam_beta2=config.betas[1],
                adam_eps=config.eps,
                clip_grad=config.grad_clip,
                use_distributed_optimizer=False,
                use_precision_aware_optimizer=False,
            ),
            [model],
        )
        (inner,) = self._megatron.chained_optimizers
        super().__init__(weights, config, adam=inner.optimizer)
        self.clear()

    def norm(self) -> float:
        """Norm of the gradients that are there, before clipping."""
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads([self._model], None)
        self._megatron.prepare_grads()
        return float(self._megatron.get_grad_norm())

    def update(self) -> None:
        """Clip, and one AdamW update; clears the gradients."""
        self._prepare()
        self._megatron.step()
        self.clear()

    def clear(self) -> None:
        """Set gradients to zero."""
        self._model.zero_grad_buffer()
        self._megatron.zero_grad()
