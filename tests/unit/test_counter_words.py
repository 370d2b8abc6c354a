"""Counters as people read them: words for each that a service keeps, units, order."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from omnifleet.telemetry.words import (
    LEVELS,
    WORDS,
    Kept,
    Told,
    Unit,
    amount,
    duration,
    kept_as,
    size,
    told,
    unit_of,
    words_of,
)

ROOT = Path(__file__).parents[2]
CALL = re.compile(r"""counters\.(?:add|gauge)\(\s*"([a-z_]+)\"""")


def kept_names() -> list[str]:
    """Names of every counter that a service of this repository adds to, as its source says."""
    sources = [*(ROOT / "services").rglob("*.py"), *(ROOT / "omnifleet").rglob("*.py")]
    return sorted({name for path in sources for name in CALL.findall(path.read_text())})


def test_every_counter_of_the_services_has_words() -> None:
    names = kept_names()
    assert len(names) > 50
    assert [name for name in names if name not in WORDS] == []


def test_every_counter_grows_or_is_a_level_or_a_quotient() -> None:
    assert WORDS.keys() >= LEVELS
    assert kept_as("puts") is kept_as("never_heard_of") is Kept.GROWS
    assert kept_as("kv_usage") is kept_as("leases_active") is Kept.LEVEL
    assert kept_as("map_rate") is kept_as("dedup_ratio") is Kept.QUOTIENT


def test_order_units_and_what_is_left_out() -> None:
    counters = {
        "zebra_bytes": 1500.0,
        "map_rate": 0.5,
        "puts": 1053.0,
        "objects": 1009.0,
        "evictions": 0.0,
        "payload_bytes/put/serialized": 7.0,
    }
    assert told(counters) == [
        Told("1,009", "media kept"),
        Told("1,053", "uploads"),
        Told("50.0%", "of reads by shared memory"),
        Told("1.5 kB", "zebra bytes"),
    ]
    assert Told("0", "media evicted") in told(counters, zeros=True)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("attempts_infra_error", "attempts ended by infra error"),
        ("refusals_resource_exhausted", "requests refused for resource exhausted"),
        ("items_unscorable_timeout", "replies without a score for timeout"),
        ("items_scored", "replies scored as scored"),
        ("never_heard_of", "never heard of"),
    ],
)
def test_names_that_are_made_up_at_run_time(name: str, words: str) -> None:
    assert words_of(name) == words


def test_numbers_and_their_units() -> None:
    assert [size(n) for n in (0, 999, 1000, 21_337_344, 5e12)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "21.3 MB",
        "5.0 TB",
    ]
    assert [duration(s) for s in (0.085, 3.39, 307, 12_000)] == ["85 ms", "3.4 s", "5 min 07 s", "3 h 20 min"]
    assert amount(1.0429, Unit.RATIO) == "1.04" and amount(2.5, Unit.COUNT) == "2.50"
    assert unit_of("wait_seconds") is Unit.SECONDS and unit_of("groups") is Unit.COUNT
