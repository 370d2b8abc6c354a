"""What a manifest claims, before any byte moves. The tensor table and the bytes are checked where the weights are."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass

from omnifleet.types import WeightVersion
from omnifleet.wire import refit_pb2
from omnifleet.wire.codec import version_from_wire
from omnifleet.wire.manifest import json_digest, manifest_json
from omnifleet_rollout.refit.shadow import check_table, check_whole, rejected
from omnifleet_rollout.worker.standing import Standing


@dataclass(frozen=True, slots=True)
class Staged:
    """digest: of the manifest that was staged. version, manifest: what is served after the commit, and what proves it."""

    digest: str
    version: WeightVersion
    manifest: refit_pb2.Manifest
    encoder_changed: bool


def check_all(body: bytes, tensors: Sequence[refit_pb2.TensorSpec]) -> None:
    """Raises REFIT_REJECTED for a manifest, as JSON, that does not bring and prove all that an engine loads."""
    told = json.loads(body)
    check_whole(told)
    check_table(told, {spec.name: (spec.dtype, list(spec.shape)) for spec in tensors})


def checked(manifest: refit_pb2.Manifest, standing: Standing) -> tuple[WeightVersion, bytes]:
    """The version that it makes, and itself as JSON. Raises REFIT_REJECTED if a worker that stands so must not take it."""
    body = manifest_json(manifest)
    digest = json_digest(body)
    claimed = version_from_wire(manifest.version)
    if claimed.manifest_digest not in ("", digest):
        raise rejected(f"the manifest's digest is {digest}, it says {claimed.manifest_digest}")
    if not claimed.run or not claimed.lineage:
        raise rejected("the manifest's version needs a run and a lineage")
    current = standing.version
    behind = claimed.same_lineage(current) and claimed.number < current.number
    if behind and not standing.fence:
        raise rejected(f"{claimed} is older than {current}; going back takes a new lineage")
    if manifest.HasField("parent"):
        parent = version_from_wire(manifest.parent)
        if standing.fence:
            raise rejected(f"this worker is fenced and needs a complete refit, not one on top of {parent}")
        if parent != current:
            raise rejected(f"the manifest builds on {parent}, this worker serves {current}")
    return WeightVersion(claimed.run, claimed.lineage, claimed.number, digest), body
