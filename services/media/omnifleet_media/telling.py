"""`omnifleet media stat`: an object, or what the service holds and has done, as lines for people."""

from __future__ import annotations

from collections.abc import Iterator

from omnifleet.client.media import Stat
from omnifleet.client.status import ServiceStatus
from omnifleet_media.console import show_size

_RATES = {
    "alias_hit_rate": "uploads that were known already",
    "segment_hit_rate": "segments that were made before",
    "map_rate": "reads answered by mapping shared memory",
}
_SIZES = frozenset({"bytes_received", "bytes_fetched", "bytes_streamed"})


def tell_object(found: Stat) -> Iterator[str]:
    """One line a fact."""
    info = found.info
    lines = {
        "kind": str(info.ref.kind),
        "size": f"{info.width}x{info.height}",
        "frames": str(len(info.frame_digests)),
        "bytes": str(info.bytes),
        "leases": str(found.leases),
        "tiers": ", ".join(found.tiers),
        **info.facts,
    }
    yield from (_row(name, value) for name, value in lines.items())


def tell_service(status: ServiceStatus) -> Iterator[str]:
    """Holdings, rates, payload by boundary, counters."""
    counters = status.counters
    yield _row("service", f"{status.state}, version {status.version}, up {status.uptime_s:.0f} s")
    yield _row("objects", f"{counters.get('objects', 0):.0f}")
    yield from (_row(name, fact) for name, fact in sorted(status.facts.items()))
    yield ""
    yield _row(
        "dedup ratio", f"{counters.get('dedup_ratio', 1):.2f}  logical bytes put for each that was new"
    )
    for name, meaning in _RATES.items():
        yield _row(name.replace("_", " "), f"{counters.get(name, 0):.1%}  {meaning}")
    yield ""
    yield from _payload(counters)
    yield ""
    for name, value in sorted(counters.items()):
        if "/" not in name and name not in _RATES and name not in ("dedup_ratio", "objects"):
            yield _row(name, show_size(value) if name in _SIZES else f"{value:.0f}")


def _payload(counters: dict[str, float]) -> Iterator[str]:
    boundaries = sorted({name.split("/")[1] for name in counters if name.startswith("payload_bytes/")})
    shown = [b for b in boundaries if counters.get(f"payload_counts/{b}/calls")]
    head = f"{'payload':20} {'calls':>8} {'logical':>9} {'physical':>9} {'saved':>9} {'serialized':>10}"
    yield f"{head} {'ratio':>7}"
    for b in shown:
        sizes = [
            counters[f"payload_bytes/{b}/{kind}"]
            for kind in ("logical_media", "physical_media", "estimated_saved", "serialized")
        ]
        logical, physical, saved, serialized = (show_size(size) for size in sizes)
        calls, ratio = (
            counters[f"payload_counts/{b}/calls"],
            counters[f"payload_ratio/{b}/physical_to_logical"],
        )
        yield f"{b:20} {calls:8.0f} {logical:>9} {physical:>9} {saved:>9} {serialized:>10} {ratio:7.3f}"


def _row(name: str, value: str) -> str:
    return f"{name:26} {value}"
