"""What the processes of a run have counted, one record a process: one that is started again counts from 0."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from omnifleet.telemetry.words import Kept, kept_as

_FILE = "counters.json"


@dataclass(frozen=True, slots=True)
class Life:
    """One process of a run. who: "media", "worker-0". began: Unix seconds. ended: how, "" while it lives for all we know.

    counters: name -> number, as of the last look.
    """

    who: str
    instance: str
    began: float
    counters: Mapping[str, float] = field(default_factory=dict)
    ended: str = ""

    @property
    def is_worker(self) -> bool:
        """True of a rollout worker, of which a run has many; of a service it has one at a time."""
        return self.who.startswith("worker-")


def read_lives(run_dir: Path) -> list[Life]:
    """What was kept so far, oldest first; [] if nothing was."""
    path = run_dir / _FILE
    body = json.loads(path.read_text()) if path.exists() else []
    return [Life(**life) for life in body if isinstance(life, dict)]


def write_lives(run_dir: Path, lives: Sequence[Life]) -> None:
    """Keep them (atomic)."""
    path = run_dir / _FILE
    scratch = path.with_name(f".{_FILE}.{os.getpid()}.tmp")
    scratch.write_text(json.dumps([asdict(life) for life in lives], indent=1))
    scratch.replace(path)


def merged(known: Iterable[Life], seen: Iterable[Life]) -> list[Life]:
    """Both, oldest first: a process that was known is as it was seen, but what only grows never gets less."""
    lives = {(life.who, life.instance): life for life in known}
    for life in seen:
        before = lives.get((life.who, life.instance), life)
        counters = {**before.counters, **life.counters}
        for name in before.counters.keys() & life.counters.keys():
            if kept_as(name) is Kept.GROWS:
                counters[name] = max(before.counters[name], life.counters[name])
        lives[life.who, life.instance] = replace(
            life, counters=counters, began=before.began or life.began, ended=life.ended or before.ended
        )
    return sorted(lives.values(), key=lambda life: (life.began, life.who))


def added_up(lives: Sequence[Life]) -> dict[str, float]:
    """Counters over lives, oldest first: what grows is summed, what is a level now is the last one's.

    Of several lives shares and ratios are left out: the last one's would stand beside sums that it does not belong to.
    """
    if len(lives) == 1:
        return dict(lives[0].counters)
    total: dict[str, float] = {}
    for life in lives:
        for name, value in life.counters.items():
            if kept_as(name) is Kept.GROWS:
                total[name] = total.get(name, 0.0) + value
    levels = {n: v for n, v in lives[-1].counters.items() if kept_as(n) is Kept.LEVEL} if lives else {}
    return {**total, **levels}


def living(lives: Iterable[Life]) -> dict[str, float]:
    """Counters of the processes that have not ended, as "<who> <name>"."""
    return {f"{life.who} {n}": v for life in lives if not life.ended for n, v in life.counters.items()}
