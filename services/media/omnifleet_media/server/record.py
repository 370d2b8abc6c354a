"""What a store can tell an empty index: a manifest's file holds the object's other facts too, outside the address.

Two lines follow the manifest: the facts as JSON, and their digest. A file of a manifest alone is fine: its object is
then known again when its source comes again.
"""

from __future__ import annotations

import json
from dataclasses import dataclass

from omnifleet.address import canonical_json, digest_bytes
from omnifleet.types import Digest
from omnifleet_media.address.manifest import MediaObject
from omnifleet_media.index.codec import object_facts, object_from

_DOMAIN = "record"


@dataclass(frozen=True, slots=True)
class Record:
    """An object and how it came: the alias of its first source, the source's digest and its bytes."""

    item: MediaObject
    alias: Digest
    source: Digest
    source_bytes: int


def record_bytes(record: Record) -> bytes:
    """The file of a manifest."""
    facts = canonical_json(
        {
            "object": object_facts(record.item),
            "alias": record.alias,
            "source": record.source,
            "source_bytes": record.source_bytes,
        }
    )
    return b"\n".join((record.item.manifest, facts, digest_bytes(facts, _DOMAIN).encode()))


def manifest_of(data: memoryview) -> memoryview:
    """The manifest in such a file: its first line."""
    end = bytes(data).find(b"\n")
    return data if end < 0 else data[:end]


def read_record(data: memoryview, digest: Digest) -> Record | None:
    """What lies beside the manifest of `digest`; None if there is nothing or it is damaged."""
    lines = bytes(data).split(b"\n")
    if len(lines) != 3 or digest_bytes(lines[1], _DOMAIN).encode() != lines[2]:
        return None
    facts = json.loads(lines[1])
    item = object_from(facts["object"])
    if item.digest != digest:
        return None
    return Record(item, Digest(facts["alias"]), Digest(facts["source"]), int(facts["source_bytes"]))
