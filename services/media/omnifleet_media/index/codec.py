"""Media objects as JSON, outside the address: for an index that keeps documents and for the facts beside a manifest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from omnifleet.types import Digest, MediaKind
from omnifleet_media.address.manifest import MediaObject


def object_facts(item: MediaObject) -> dict[str, Any]:
    """All fields of an object in JSON's own types."""
    return {field.name: getattr(item, field.name) for field in fields(item)} | {"facts": dict(item.facts)}


def object_from(facts: Mapping[str, Any]) -> MediaObject:
    """The object of `object_facts`. Raises KeyError, TypeError or ValueError for anything else."""
    return MediaObject(
        **{
            **facts,
            "kind": MediaKind(facts["kind"]),
            "frames": tuple(Digest(frame) for frame in facts["frames"]),
            "timestamps_us": tuple(facts["timestamps_us"]),
        }
    )
