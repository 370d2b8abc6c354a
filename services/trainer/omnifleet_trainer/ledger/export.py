"""Trajectories out of a ledger: JSON lines for people and pipes, Parquet for tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from itertools import islice
from pathlib import Path
from typing import IO, Any

from omnifleet.errors import OmnifleetError, Reason
from omnifleet_trainer.ledger.queries import LedgerRow

_CHUNK_ROWS = 2048


def write_json_lines(rows: Iterable[LedgerRow], out: IO[str]) -> int:
    """One trajectory a line; returns how many."""
    count = 0
    for row in rows:
        out.write(json.dumps(row.as_json(), ensure_ascii=False) + "\n")
        count += 1
    return count


def write_parquet(
    rows: Iterable[LedgerRow], path: Path, *, told: Callable[[int], None] = lambda n: None
) -> int:
    """All rows into one Parquet file (zstd), written under another name and renamed when whole; returns how many.

    Lists of numbers stay lists; `spans`, `components` and `extra` are JSON text, since their keys vary. At most 2048
    rows are in memory. told: called with the rows written so far. Raises UNSUPPORTED without pyarrow, DISK_FULL.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise OmnifleetError(
            Reason.UNSUPPORTED,
            f"Parquet needs pyarrow ({error})",
            knob="pip install pyarrow, or --format jsonl",
        ) from error
    text, number = pa.string(), pa.int64()
    schema = pa.schema(
        [
            *((name, text) for name in ("trajectory", "group", "prompt_id", "state", "outcome", "lineage")),
            ("step", number),
            ("sample", number),
            ("tokens", number),
            ("reward", pa.float64()),
            ("reward_version", text),
            ("media", pa.list_(text)),
            ("spans", text),
            ("prompt", text),
            ("ground_truth", text),
            ("text", text),
            ("finish_reason", text),
            ("components", text),
            ("extra", text),
            ("prompt_hash", text),
            ("prompt_token_ids", pa.list_(pa.int32())),
            ("token_ids", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float64())),
        ]
    )
    scratch = path.with_name(f".{path.name}.writing")
    count = 0
    try:
        with pq.ParquetWriter(scratch, schema, compression="zstd") as writer:
            for chunk in _chunks(rows):
                body = [_flat(row, schema.names) for row in chunk]
                writer.write_table(pa.Table.from_pylist(body, schema=schema))
                count += len(body)
                told(count)
        scratch.replace(path)
    except OSError as error:
        raise OmnifleetError(Reason.DISK_FULL, f"cannot write {path}: {error}", knob="--out") from error
    finally:
        scratch.unlink(missing_ok=True)
    return count


def _chunks(rows: Iterable[LedgerRow]) -> Iterator[list[LedgerRow]]:
    rest = iter(rows)
    while chunk := list(islice(rest, _CHUNK_ROWS)):
        yield chunk


def _flat(row: LedgerRow, names: list[str]) -> dict[str, Any]:
    body = row.as_json()
    body["sample"] = row.sample
    body["media"] = row.media_digests.split()
    for name in ("spans", "components", "extra"):
        body[name] = json.dumps(body.get(name), ensure_ascii=False) if name in body else None
    return {name: body.get(name) for name in names}
