"""Values of tokens to one number. Divisors are those of the whole update, so cuts into micro-batches add up."""

from __future__ import annotations

from torch import Tensor

from omnifleet_trainer.objectives.tensors import Normalisers, masked, masked_mean

_TINY = 1e-8


def reduce(
    values: Tensor,
    mask: Tensor,
    normalisers: Normalisers,
    reduction: str,
    reduction_tokens: int | None = None,
) -> Tensor:
    """values, mask: [B, T]; a masked sample is a row of zeros. N_tok, N_seq: `normalisers`. Returns a scalar.

    `token` (DAPO, 2503.14476): Σ / N_tok. `sequence` (GRPO, 2402.03300): Σ_b mean_t / N_seq.
    `constant` (Dr.GRPO, 2503.20783): Σ / (N_seq · reduction_tokens), so a token's weight depends on no reply's length.
    Raises ValueError for `constant` without reduction_tokens.
    """
    values = masked(values, mask)
    match reduction:
        case "sequence":
            return masked_mean(values, mask).sum() / (normalisers.sequences + _TINY)
        case "constant":
            if reduction_tokens is None:
                raise ValueError("reduction = constant needs reduction_tokens")
            return values.sum() / (normalisers.sequences * reduction_tokens + _TINY)
    return values.sum() / (normalisers.tokens + _TINY)
