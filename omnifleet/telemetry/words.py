"""How counters are told to people: a number with its unit, then words ("21.3 MB uploaded"), in an order worth reading."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum


class Unit(StrEnum):
    """What a counter's number is."""

    COUNT = "count"
    BYTES = "bytes"
    SECONDS = "seconds"
    SHARE = "share"
    RATIO = "ratio"


class Kept(StrEnum):
    """What a counter does over the life of its process."""

    GROWS = "grows"
    LEVEL = "level"
    QUOTIENT = "quotient"


WORDS: dict[str, tuple[str, Unit]] = {
    # trainer
    "step": ("steps trained", Unit.COUNT),
    "groups_running": ("groups being generated", Unit.COUNT),
    "groups_waiting": ("groups waiting to train", Unit.COUNT),
    "groups_ready": ("groups made ready so far", Unit.COUNT),
    "groups_without_signal": ("groups of equal rewards", Unit.COUNT),
    "groups_expired": ("groups too old to train", Unit.COUNT),
    "groups_late": ("groups that came too late", Unit.COUNT),
    "prompts_given_up": ("prompts given up", Unit.COUNT),
    "rollout_timeouts": ("rollouts out of time", Unit.COUNT),
    "episodes": ("episodes played", Unit.COUNT),
    "environment_restarts": ("environment processes restarted", Unit.COUNT),
    "turns_not_woken": ("engines not woken for their turn", Unit.COUNT),
    "sink_errors": ("metrics not delivered", Unit.COUNT),
    # gateway
    "workers_ready": ("workers ready", Unit.COUNT),
    "requests_in_flight": ("requests running", Unit.COUNT),
    "queue_depth": ("requests waiting", Unit.COUNT),
    "requests": ("requests so far", Unit.COUNT),
    "samples": ("replies asked for", Unit.COUNT),
    "samples_finished": ("replies finished", Unit.COUNT),
    "samples_failed": ("replies failed", Unit.COUNT),
    "tokens": ("tokens", Unit.COUNT),
    # worker
    "weight_version": ("steps in its weights", Unit.COUNT),
    "requests_running": ("requests running", Unit.COUNT),
    "requests_waiting": ("requests waiting", Unit.COUNT),
    "kv_usage": ("of KV memory in use", Unit.SHARE),
    "tokens_generated": ("tokens generated", Unit.COUNT),
    "pictures_sent": ("pictures given to the engine", Unit.COUNT),
    "clips_sent": ("clips given to the engine", Unit.COUNT),
    "sounds_sent": ("sounds given to the engine", Unit.COUNT),
    "media_resent": ("of them again", Unit.COUNT),
    "encoder_items": ("runs of the vision encoder", Unit.COUNT),
    "refits": ("refits", Unit.COUNT),
    "refits_with_requests_running": ("refits while requests ran", Unit.COUNT),
    "refits_rolled_back": ("refits rolled back", Unit.COUNT),
    "refits_quarantined": ("refits put in quarantine", Unit.COUNT),
    "refits_fenced": ("refits that fenced the worker", Unit.COUNT),
    "refits_in_place": ("refits without a shadow", Unit.COUNT),
    "catch_ups_from_peers": ("refits from another worker", Unit.COUNT),
    "refit_bytes": ("of weights received", Unit.BYTES),
    "refit_stage_seconds": ("staging weights", Unit.SECONDS),
    "refit_gate_seconds": ("without a token, in refits", Unit.SECONDS),
    "span_mismatches": ("replies whose versions did not add up", Unit.COUNT),
    "busy_seconds": ("with a request in the engine", Unit.SECONDS),
    "loop_late_seconds": ("the event loop was late, in sum", Unit.SECONDS),
    # media
    "objects": ("media kept", Unit.COUNT),
    "objects_restored": ("of them found on disk at the start", Unit.COUNT),
    "puts": ("uploads", Unit.COUNT),
    "alias_hits": ("uploads known already", Unit.COUNT),
    "alias_hit_rate": ("of uploads known already", Unit.SHARE),
    "dedup_ratio": ("uploads for each medium", Unit.RATIO),
    "decodes": ("media decoded", Unit.COUNT),
    "segments_computed": ("media preprocessed", Unit.COUNT),
    "segments_served": ("uses by models", Unit.COUNT),
    "segment_hits": ("uses without preprocessing", Unit.COUNT),
    "segment_hit_rate": ("of uses without preprocessing", Unit.SHARE),
    "reads": ("reads", Unit.COUNT),
    "shm_maps": ("reads by shared memory", Unit.COUNT),
    "map_rate": ("of reads by shared memory", Unit.SHARE),
    "bytes_received": ("uploaded", Unit.BYTES),
    "bytes_fetched": ("fetched from URLs", Unit.BYTES),
    "bytes_streamed": ("copied out", Unit.BYTES),
    "shared_memory_bytes_used": ("in shared memory", Unit.BYTES),
    "shared_memory_refused": ("places in shared memory refused", Unit.COUNT),
    "disk_bytes_used": ("on disk", Unit.BYTES),
    "leases_active": ("leases", Unit.COUNT),
    "evictions": ("media evicted", Unit.COUNT),
    "demotions": ("media moved to disk only", Unit.COUNT),
    "verified": ("files verified", Unit.COUNT),
    # reward
    "items": ("replies scored", Unit.COUNT),
    "items_unparseable": ("of them not parseable", Unit.COUNT),
    "items_timeout": ("of them out of time", Unit.COUNT),
    "items_crashed": ("of them crashed their scorer", Unit.COUNT),
    "items_unscorable": ("replies without a score", Unit.COUNT),
    "batches": ("batches", Unit.COUNT),
    "items_waiting": ("replies waiting", Unit.COUNT),
    "processes_busy": ("scorer processes busy", Unit.COUNT),
    "processes_started": ("scorer processes started", Unit.COUNT),
    "processes_replaced": ("scorer processes replaced", Unit.COUNT),
    "asks": ("calls to judges", Unit.COUNT),
    "asks_cached": ("calls answered from the cache", Unit.COUNT),
    "asks_repeated": ("calls repeated", Unit.COUNT),
    "asks_waiting": ("calls waiting", Unit.COUNT),
}
LEVELS = frozenset(
    {
        "step",
        "groups_running",
        "groups_waiting",
        "workers_ready",
        "requests_in_flight",
        "queue_depth",
        "weight_version",
        "requests_running",
        "requests_waiting",
        "kv_usage",
        "objects",
        "objects_restored",
        "shared_memory_bytes_used",
        "disk_bytes_used",
        "leases_active",
        "items_waiting",
        "processes_busy",
        "asks_waiting",
    }
)
"""Of `WORDS`, what goes up and down: sums of it over processes or over time mean nothing."""
_PLACES = {name: place for place, name in enumerate(WORDS)}
_FAMILIES = {
    "attempts_": "attempts ended by",
    "refused_": "samples refused by check",
    "refusals_": "requests refused for",
    "items_unscorable_": "replies without a score for",
    "items_": "replies scored as",
}
_ENDINGS = {
    "_bytes": Unit.BYTES,
    "_bytes_used": Unit.BYTES,
    "_seconds": Unit.SECONDS,
    "_s": Unit.SECONDS,
    "_rate": Unit.SHARE,
    "_share": Unit.SHARE,
    "_usage": Unit.SHARE,
    "_ratio": Unit.RATIO,
}


@dataclass(frozen=True, slots=True)
class Told:
    """A counter as a person reads it: `value` "1.2 MB", `words` "uploaded"."""

    value: str
    words: str


def told(counters: Mapping[str, float], *, zeros: bool = False) -> list[Told]:
    """Counters of one service in their order; those of 0 only with `zeros`, payloads by boundary ("a/b/c") never."""
    names = [name for name, value in counters.items() if "/" not in name and (value or zeros)]
    names.sort(key=lambda name: (_PLACES.get(name, len(_PLACES)), name))
    return [Told(amount(counters[name], unit_of(name)), words_of(name)) for name in names]


def words_of(name: str) -> str:
    """What a counter counts. One that is not known here is told by its name, without underscores."""
    if name in WORDS:
        return WORDS[name][0]
    for prefix, words in _FAMILIES.items():
        if name.startswith(prefix):
            return f"{words} {name.removeprefix(prefix).replace('_', ' ')}"
    return name.replace("_", " ")


def unit_of(name: str) -> Unit:
    """The unit of a counter, by the table or by how its name ends."""
    if name in WORDS:
        return WORDS[name][1]
    return next((unit for ending, unit in _ENDINGS.items() if name.endswith(ending)), Unit.COUNT)


def kept_as(name: str) -> Kept:
    """Whether a counter's number only grows, is a level that comes and goes, or a quotient of others."""
    if name in LEVELS:
        return Kept.LEVEL
    return Kept.QUOTIENT if unit_of(name) in (Unit.SHARE, Unit.RATIO) else Kept.GROWS


def amount(value: float, unit: Unit) -> str:
    """A number with its unit: 1,009 | 21.3 MB | 3.4 s | 51.7% | 1.04."""
    match unit:
        case Unit.BYTES:
            return size(value)
        case Unit.SECONDS:
            return duration(value)
        case Unit.SHARE:
            return f"{value:.1%}"
        case Unit.RATIO:
            return f"{value:.3g}"
    return f"{value:,.0f}" if value == int(value) else f"{value:,.2f}"


def size(count: float) -> str:
    """Bytes in powers of 1000: 12 B, 21.3 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if abs(count) < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:,.1f} TB"


def duration(seconds: float) -> str:
    """Seconds: 85 ms, 3.4 s, 5 min 07 s, 3 h 20 min."""
    if seconds < 1:
        return f"{seconds * 1000:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes} min {rest:02d} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min"
