"""The routers of a Megatron mixture, made to choose what the engine chose.

Each asks what stands in its `router_replay` for its best k. megatron-core's own `RouterReplay` would enter every router of
the process in one list, and answer for all tokens or none; what stands here belongs to one model, and leaves a token that
the engine did not speak of to the router.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from omnifleet_trainer.batch.collate import MicroBatch
from omnifleet_trainer.policy.megatron_sequence import Division
from omnifleet_trainer.policy.packing import Packing
from omnifleet_trainer.policy.peers import Peers
from omnifleet_trainer.policy.replay import Mixture

TopK = Callable[..., tuple[Tensor, Tensor]]


class MegatronRouters:
    """The routers of this rank's layers of one model. Collective: of its stages, each has some."""

    def __init__(self, core: nn.Module, layers: int, peers: Peers) -> None:
        """layers: of the whole decoder, those that do not route too."""
        from megatron.core.transformer.moe.router import TopKRouter

        routers = {
            module.layer_number - 1: module for module in core.modules() if isinstance(module, TopKRouter)
        }
        self._choices: dict[int, _Choice] = {}
        for number, router in routers.items():
            router.router_replay = self._choices[number] = _Choice()
        config: Any = next((router.config for router in routers.values()), None)
        shape = [0, 0] if config is None else [config.num_moe_experts, config.moe_router_topk]
        told = peers.everyone([sorted(routers), shape])
        experts, chosen = max(shape for _, shape in told)
        numbers = tuple(sorted({number for some, _ in told for number in some}))
        self.mixture = Mixture(numbers, layers, experts, chosen)
        self._current: Tensor | None = None

    def replaying(
        self, micro: MicroBatch, *, packed: bool, division: Division | None = None
    ) -> AbstractContextManager[None]:
        """Inside, the routers choose what the engine chose for `micro`; their own where it did not say.

        Hidden states are [T, 1, H] if packed, else [S, B, H]: that is the order of tokens here. division: which of
        these tokens this rank's routers see; None = all.
        """
        if micro.experts is None:
            return self._choosing(None)
        if not packed:
            columns = micro.experts.transpose(0, 1)
            return self._choosing((columns if division is None else division.own(columns)).flatten(0, 1))
        if division is None:
            return self._choosing(Packing(micro).packed(micro.experts)[0])
        filled = Packing(micro, division.multiple).packed(micro.experts + 1)[0] - 1  # -1: nobody chose
        return self._choosing(division.own(filled))

    def again(self) -> AbstractContextManager[None]:
        """For a layer that is computed again in the backward pass: the choice of now, whatever it is by then."""
        return self._choosing(self._current)

    @contextmanager
    def _choosing(self, experts: Tensor | None) -> Iterator[None]:
        """experts: [tokens, layers, experts a token]."""
        before = self._current
        self._set(experts)
        try:
            yield
        finally:
            self._set(before)

    def _set(self, experts: Tensor | None) -> None:
        self._current = experts
        rows = {} if experts is None else self.mixture.rows(experts.shape[1])
        for number, choice in self._choices.items():
            choice.ids = None if experts is None else experts[:, rows[number]]


class _Choice:
    """In the place of a `RouterReplay`. ids: [tokens, k], -1 where the router decides; None where it always does."""

    def __init__(self) -> None:
        self.ids: Tensor | None = None

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """scores: [tokens, experts] -> those of the chosen, and which these are; each [tokens, topk]."""
        assert default_compute_topk is not None, "routers bring theirs"
        values, own = default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)
        if self.ids is None:
            return values, own
        if self.ids.shape != own.shape:
            raise ValueError(
                f"the router has {tuple(own.shape)} to choose, replayed are {tuple(self.ids.shape)}"
            )
        ids = torch.where(self.ids < 0, own, self.ids)
        return scores.gather(1, ids), ids
