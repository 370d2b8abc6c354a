"""Plans that were checked, kept on disk: the next engine of the same build and model begins with a plan that is believed.

A kept plan says by its key what it is of (engine build, model, tensor table, layout of parameter memory) and by its
digest that it is whole. One that is damaged, foreign or does not fit is removed, and made anew by the engine.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from omnifleet.address import canonical_json, digest_bytes
from omnifleet_refit.windows import View
from omnifleet_rollout.refit.plan import Fill, Move, Plan

log = logging.getLogger("omnifleet.rollout.refit")
FORMAT = 1
_LARGEST_BYTES = 256 << 20


def plans_folder() -> Path:
    """``$XDG_CACHE_HOME/omnifleet/refit-plans``, else under ``~/.cache``."""
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "omnifleet" / "refit-plans"


class KeptPlans:
    """One file a plan, named by its key. Nothing here raises: without the folder, plans are made at each start."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: str, model: torch.nn.Module) -> Plan | None:
        """The plan of this key, if a whole one is kept that fits the model's memory."""
        path = self._path(key)
        try:
            if path.stat().st_size > _LARGEST_BYTES:
                raise ValueError(f"larger than {_LARGEST_BYTES} bytes")
            plan = _read(path.read_bytes(), key)
            plan.check_fits(model)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, LookupError) as error:
            log.warning("the kept refit plan %s is refused and made anew: %s", path, error)
            self.forget(key)
            return None
        log.info("refit plan %s is kept from an earlier start: %d copies", key[:12], len(plan.moves))
        return plan

    def keep(self, plan: Plan) -> None:
        """Write a plan that was checked."""
        path = self._path(plan.key)
        scratch = path.with_suffix(f".{secrets.token_hex(4)}.tmp")
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            with os.fdopen(os.open(scratch, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
                file.write(_written(plan))
            scratch.replace(path)
        except (OSError, ValueError) as error:
            log.warning("the refit plan is not kept: %s", error)
            with suppress(OSError):
                scratch.unlink(missing_ok=True)

    def forget(self, key: str) -> None:
        """Remove the plan of this key, if there is one."""
        try:
            self._path(key).unlink(missing_ok=True)
        except OSError as error:
            log.warning("a refit plan cannot be removed: %s", error)

    def _path(self, key: str) -> Path:
        return self._folder / f"{key}.json"


def _written(plan: Plan) -> bytes:
    body = asdict(plan)
    digest = digest_bytes(canonical_json(body), "refit-plan-file")
    return canonical_json({"format": FORMAT, "digest": digest, "plan": body})


def _read(data: bytes, key: str) -> Plan:
    """Raises ValueError, KeyError or TypeError for what `_written` did not write, or of another key."""
    file = json.loads(data)
    if file["format"] != FORMAT:
        raise ValueError(f"format {file['format']}, known is {FORMAT}")
    body = file["plan"]
    if digest_bytes(canonical_json(body), "refit-plan-file") != file["digest"]:
        raise ValueError("it does not match its digest")
    if body["key"] != key:
        raise ValueError(f"it is of another engine or model, {str(body['key'])[:12]}")
    return Plan(
        key=body["key"],
        moves=tuple(
            Move(m["source"], _view(m["read"]), m["target"], _view(m["write"])) for m in body["moves"]
        ),
        fills=tuple(Fill(f["target"], _view(f["write"]), float(f["value"])) for f in body["fills"]),
        shapes={name: tuple(shape) for name, shape in body["shapes"].items()},
        untouched=tuple(body["untouched"]),
        unread=tuple(body["unread"]),
    )


def _view(body: dict[str, Any]) -> View:
    return View(int(body["offset"]), tuple(map(int, body["shape"])), tuple(map(int, body["stride"])))
