"""What some engines return beside tokens, on its way to the trainer: router replay and sampling masks, as safetensors."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from safetensors.numpy import save

from omnifleet_rollout.engine.port import EngineDelta


class Extras:
    """Collected over the engine requests of one sample. `before`: reply tokens that another worker made."""

    def __init__(self, before: int) -> None:
        self._before = before
        self._experts: npt.NDArray[np.generic] | None = None
        self._masks: list[list[int]] = []
        self._masked = False

    def take(self, delta: EngineDelta) -> None:
        """Add what came with new tokens. A later array of experts covers all that earlier ones did."""
        if delta.routed_experts is not None:
            self._experts = delta.routed_experts
        if delta.sampling_mask is not None:
            self._masked = True
            self._masks.extend(delta.sampling_mask)

    def routed_experts(self) -> bytes:
        """Safetensors with `routed_experts` [prompt + reply - 1, layers, experts a token]; empty if the engine has none."""
        if self._experts is None:
            return b""
        return save({"routed_experts": np.ascontiguousarray(self._experts)})

    def sampling_mask(self) -> bytes:
        """Safetensors, empty if the engine has none.

        token_ids: int32, the ids that each token was drawn from, one after another; lengths: int32, how many for each
        token; start: int64 [1], the reply token that the first length is of (what another worker made before has none).
        """
        if not self._masked:
            return b""
        ids = [token for mask in self._masks for token in mask]
        return save(
            {
                "token_ids": np.asarray(ids, np.int32),
                "lengths": np.asarray([len(mask) for mask in self._masks], np.int32),
                "start": np.asarray([self._before], np.int64),
            }
        )
