"""What some engines say of a reply beside its tokens, read and checked: chosen experts, and what filters left to draw from.

Both are safetensors, as a rollout worker writes them. Needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from safetensors import SafetensorError
from safetensors.numpy import load

from omnifleet.config.recipe import Recipe
from omnifleet.errors import OmnifleetError, Reason, invalid


@dataclass(frozen=True, slots=True)
class Replay:
    """What the trainer does over as the engine did: its choice of experts, its filters' choice of ids."""

    experts: bool = False
    kept_ids: bool = False

    @staticmethod
    def of(recipe: Recipe) -> Replay:
        """All that the recipe has engines return."""
        engine = recipe.rollout.engine
        return Replay(engine.return_routed_experts, engine.return_sampling_mask)

    @property
    def names(self) -> tuple[str, ...]:
        """As a request asks for them."""
        wanted = {"routed_experts": self.experts, "sampling_mask": self.kept_ids}
        return tuple(name for name, asked in wanted.items() if asked)


NO_REPLAY = Replay()


def read_experts(data: bytes, tokens: int) -> npt.NDArray[Any]:
    """Integers [tokens - 1, layers, experts a token]: what each token but the last was routed to, prompt included.

    tokens: of prompt and reply. Raises OmnifleetError(INVALID_REQUEST) for another shape, UNAVAILABLE (retryable) if the
    engine gave none: a preemption may lose them.
    """
    if not data:
        raise _missing("no routed experts", "rollout.engine.return_routed_experts")
    experts = _load(data, "routed_experts").get("routed_experts")
    if experts is None or experts.ndim != 3 or experts.dtype.kind not in "iu" or 0 in experts.shape[1:]:
        raise invalid("routed experts are integers [tokens - 1, layers, experts a token], these are not")
    if len(experts) != tokens - 1:
        raise invalid(f"routed experts of {len(experts)} tokens for {tokens} tokens, want all but the last")
    if experts.size and (int(experts.min()) < 0 or int(experts.max()) > np.iinfo(np.int16).max):
        raise invalid("a routed expert has a number that no expert has")
    return experts


def read_kept(data: bytes, token_ids: list[int]) -> list[list[int]]:
    """For each reply token the ids that it was drawn from; an empty list where no filter took any.

    Raises OmnifleetError(INVALID_REQUEST) for a mask that does not fit the tokens, UNAVAILABLE (retryable) if there is
    none, or only one of the tokens that the last of two workers made.
    """
    if not data:
        raise _missing("no sampling mask", "rollout.engine.return_sampling_mask")
    body = _load(data, "sampling_mask")
    try:
        ids, lengths, start = body["token_ids"], body["lengths"], int(body["start"][0])
    except (KeyError, IndexError) as error:
        raise invalid(f"the sampling mask lacks {error}") from None
    if start:
        raise _missing(f"no sampling mask of the first {start} tokens", "rollout.engine.return_sampling_mask")
    if len(lengths) != len(token_ids) or int(lengths.sum()) != len(ids) or (lengths < 0).any():
        raise invalid(
            f"a sampling mask of {len(lengths)} tokens and {len(ids)} ids for {len(token_ids)} reply tokens"
        )
    kept: list[list[int]] = [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]
    for t, (token, choice) in enumerate(zip(token_ids, kept, strict=True)):
        if choice and token not in choice:
            raise invalid(f"reply token {t} ({token}) is none of the {len(choice)} ids it was drawn from")
    return kept


def _load(data: bytes, what: str) -> dict[str, npt.NDArray[Any]]:
    try:
        return load(data)
    except (SafetensorError, ValueError) as error:
        raise invalid(f"{what} cannot be read: {error}") from None


def _missing(what: str, knob: str) -> OmnifleetError:
    return OmnifleetError(
        Reason.UNAVAILABLE, f"the reply came with {what}, and the recipe wants them replayed", True, knob
    )
