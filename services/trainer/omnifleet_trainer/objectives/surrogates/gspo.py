"""Ratios of sequences. Source: GSPO 2507.18071.

    s = exp(mean_t (l_t - old_t)) over the sample's trained tokens, the same for each of them
    GSPO-token: s_t = stopgrad(s) · exp(l_t - stopgrad l_t), of value s, with the gradient of its own token

For one advantage a sample both have the same gradient; with advantages that differ inside a sample only the second
credits each token with its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from omnifleet_trainer.objectives.surrogates.port import token_ratio
from omnifleet_trainer.objectives.tensors import Tokens, exp_ratio, masked_mean


def policy_ratio(tokens: Tokens, level: str) -> Tensor:
    """r of each token at level `token`, `sequence` or `sequence_token`; [B, T]."""
    if level == "token":
        return token_ratio(tokens)
    mean = masked_mean(tokens.current - tokens.old, tokens.mask)[:, None].expand_as(tokens.mask)
    if level == "sequence":
        return exp_ratio(mean)
    return exp_ratio(mean.detach()) * torch.exp(tokens.current - tokens.current.detach())
