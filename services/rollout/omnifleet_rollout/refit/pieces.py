"""A refit in parts: this rank is sent the slices that its plan reads, and no others.

Each part of a manifest is for some ranks of an engine. Its pieces are windows of tensors, each with a digest of its own;
together they must be what the plan needs of the tensors that changed: no window missing, none twice, none besides.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from omnifleet_refit.windows import Needs, View
from omnifleet_rollout.refit.buckets import Bucket, layout
from omnifleet_rollout.refit.shadow import rejected

Key = tuple[str, View]
"""A window of a source tensor."""
Pieces = dict[Key, torch.Tensor]
"""Each of its window's shape, contiguous."""


@dataclass(frozen=True, slots=True)
class Leg:
    """A part that this rank takes. number: in the manifest; keys: what the names in `buckets` stand for."""

    number: int
    ranks: tuple[int, ...]
    buckets: list[Bucket]
    keys: Mapping[str, Key]


def legs_of(body: Mapping[str, Any], rank: int, needs: Needs) -> list[Leg]:
    """The parts of a manifest body for one rank, checked. Raises REFIT_REJECTED, before any memory is taken."""
    dtypes = {tensor["name"]: tensor["dtype"] for tensor in body["tensors"]}
    if body["buckets"] or any(tensor.get("encoding") for tensor in body["tensors"]):
        raise rejected("a manifest in parts has neither buckets of its own nor sparse tensors")
    legs = []
    for number, part in enumerate(body["parts"]):
        if not all(piece["name"] in dtypes for piece in part["pieces"]):
            raise rejected(f"part {number} has a piece of a tensor that the manifest does not name")
        if rank in part["ranks"]:
            legs.append(_leg(number, part, dtypes, body["checksum_algorithm"]))
    changed = {tensor["name"] for tensor in body["tensors"] if tensor["changed"]}
    wanted = {(name, view) for name, views in needs.items() if name in changed for view in views}
    _check_coverage([key for leg in legs for key in leg.keys.values()], wanted)
    return legs


def as_pieces(legs: Sequence[Leg], tensors: Mapping[str, torch.Tensor]) -> Pieces:
    """Tensors by the names in their buckets -> by window."""
    return {key: tensors[label] for leg in legs for label, key in leg.keys.items()}


def _leg(number: int, part: Mapping[str, Any], dtypes: Mapping[str, str], algorithm: str) -> Leg:
    keys: dict[str, Key] = {}
    entries = []
    for piece in part["pieces"]:
        view = View.parse(piece["window"])
        label = f"{piece['name']} from {view.offset} by {list(view.shape)} in steps of {list(view.stride)}"
        if label in keys:
            raise rejected(f"part {number} has {label} twice")
        keys[label] = (piece["name"], view)
        entry = {"name": label, "dtype": dtypes[piece["name"]], "shape": list(view.shape), "changed": True}
        entries.append(entry | {field: piece[field] for field in ("bucket", "offset", "bytes", "digest")})
    whole = {"tensors": entries, "buckets": part["buckets"], "checksum_algorithm": algorithm}
    return Leg(number, tuple(part["ranks"]), layout(whole), keys)


def _check_coverage(given: Sequence[Key], wanted: set[Key]) -> None:
    missing, others = wanted - set(given), set(given) - wanted
    if missing or others or len(given) != len(wanted):
        names = sorted({name for name, _ in missing | others})
        raise rejected(
            f"this rank reads {len(wanted)} slices of what changed and is sent {len(given)}: "
            f"{len(missing)} are missing, {len(others)} are not its own ({', '.join(names[:3])})"
        )
