"""`omnifleet media put`: files, folders and URLs, several at a time, each refused or stored by itself."""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import typer

from omnifleet.client.media import MediaClient
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.types import MediaKind
from omnifleet.wire import media_pb2
from omnifleet_media.console import bar, say, show_size

_OF_ONE_FILE = frozenset(
    {Reason.INVALID_MEDIA, Reason.INVALID_REQUEST, Reason.LIMIT_EXCEEDED, Reason.UNSUPPORTED}
)


@dataclass(frozen=True, slots=True)
class PutAs:
    """How every source is put. jobs: sources at once."""

    kind: MediaKind
    contract: media_pb2.DecodeContract
    run: str
    durable: bool
    lease_owner: str
    lease_s: float
    jobs: int
    as_json: bool


async def put_all(client: MediaClient, sources: Sequence[str], how: PutAs) -> None:
    """Put everything; one line a source on stdout. Refused sources are told on stderr and end in status 1."""
    names = list(named(sources))
    started, queue = time.monotonic(), iter(names)
    new = refused = size = 0

    with bar("storing", len(names)) as step:

        async def worker() -> None:
            nonlocal new, refused, size
            for name in queue:
                try:
                    reply = await _put(client, name, how)
                except OmnifleetError as error:
                    if error.reason not in _OF_ONE_FILE:
                        raise
                    refused += 1
                    say(f"{name}: {error}")
                else:
                    new += reply.decoded
                    size += int(reply.info.facts.get("source_bytes", 0))
                    typer.echo(_line(reply, name, how.as_json))
                step()

        try:
            async with asyncio.TaskGroup() as group:
                for _ in range(min(how.jobs, len(names))):
                    group.create_task(worker())
        except* OmnifleetError as failed:
            raise failed.exceptions[0] from None
    if len(names) > 1:
        took = time.monotonic() - started
        say(
            f"{len(names) - refused} stored ({new} new), {refused} refused, {show_size(size)} in {took:.1f} s"
        )
    if refused:
        raise typer.Exit(1)


def named(sources: Iterable[str]) -> Iterator[str]:
    """The files of folders (sorted, hidden ones left out), and what else was named. Raises INVALID_REQUEST."""
    for source in sources:
        if "://" in source:
            yield source
        elif Path(source).is_dir():
            yield from _files(source)
        elif Path(source).exists():
            yield source
        else:
            raise invalid(f"{source}: no such file or folder")


def _files(folder: str) -> Iterator[str]:
    for at, folders, files in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        for name in sorted(files):
            if not name.startswith("."):
                yield os.path.join(at, name)


async def _put(client: MediaClient, name: str, how: PutAs) -> media_pb2.PutReply:
    lease_ttl_ms = int(how.lease_s * 1000) if how.lease_owner else 0
    if "://" in name:
        return await client.put_url(
            name, how.run, kind=how.kind, contract=how.contract, durable=how.durable,
            lease_owner=how.lease_owner, lease_ttl_ms=lease_ttl_ms,
        )  # fmt: skip
    try:
        data = await asyncio.to_thread(Path(name).read_bytes)
    except OSError as error:
        raise invalid(f"cannot be read: {error.strerror}", reason=Reason.INVALID_MEDIA) from error
    return await client.put(
        data, how.run, kind=how.kind, contract=how.contract, durable=how.durable,
        lease_owner=how.lease_owner, lease_ttl_ms=lease_ttl_ms,
    )  # fmt: skip


def _line(reply: media_pb2.PutReply, name: str, as_json: bool) -> str:
    info = reply.info
    if as_json:
        facts = {
            "name": name,
            "digest": reply.ref.digest,
            "source_digest": reply.source_digest,
            "new": reply.decoded,
            "width": info.width,
            "height": info.height,
            "frames": len(info.frame_digests),
            "lease": reply.lease.id,
        }
        return json.dumps(facts)
    shape = f"{info.width}x{info.height}" + (f"x{len(info.frame_digests)}" if info.timestamps_s else "")
    return f"{reply.ref.digest}  {shape}  {name}"
