"""The head of a model, taken apart, so that logits need not exist all at once (`trainer.logprob_chunk`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.policy.sharded import enter, make_enterable, plain_forward


@dataclass(frozen=True, slots=True)
class PlainHead:
    """body: the model without its head; its forward gives last_hidden_state. module: the head."""

    body: Any
    module: Any

    @property
    def weight(self) -> Tensor:
        """[V, H]; of a head that is spread over ranks, only inside `enter(head.module, ...)`."""
        weight: Tensor = self.module.weight
        return weight


def plain_head(model: Any) -> PlainHead:
    """The head of a transformers model, proved on a few tokens to be a matrix product and nothing else.

    Raises UNSUPPORTED if it is more (a bias, a scale, a soft cap), or cannot be found.
    """
    inner = model if getattr(model, "model", None) is not None else getattr(model, "language_model", model)
    body, head = getattr(inner, "model", None), inner.get_output_embeddings()
    if body is None or head is None or getattr(head, "bias", None) is not None:
        raise _refused(model, "has no head of its own that is a matrix alone")
    ids = torch.arange(4, device=next(head.parameters()).device)[None]
    with torch.no_grad():
        logits = plain_forward(model, input_ids=ids, use_cache=False).logits
        hidden = body(input_ids=ids, use_cache=False).last_hidden_state
        if isinstance(head, FSDPModule):  # its weights are gathered in its own forward only
            make_enterable(head)
        product = enter(head, lambda: hidden @ head.weight.T)
    if not torch.allclose(logits, product, rtol=1e-4, atol=1e-5):
        raise _refused(model, "does more than a matrix product in its head")
    return PlainHead(body, head)


def _refused(model: Any, what: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.UNSUPPORTED,
        f"{type(model).__name__} {what}: its logits cannot be computed in chunks",
        knob="trainer.logprob_chunk",
    )
