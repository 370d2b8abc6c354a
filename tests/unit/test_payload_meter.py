"""Payload metrics: sums, ratios, names."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from prometheus_client import CollectorRegistry, generate_latest

from omnifleet.telemetry.payload import PayloadMeter
from omnifleet.wire.counting import boundary_of


def test_the_worked_example_of_a_group() -> None:
    """A has 1 segment, B has 2, three generations each: 3 physical, 9 logical."""
    meter = PayloadMeter("media")
    sizes = (10, 20, 30)
    meter.moved(
        "prompt_repeat",
        logical_bytes=3 * sum(sizes),
        physical_bytes=sum(sizes),
        logical_segments=9,
        physical_segments=3,
        key="pixel_values",
    )
    meter.serialized("prompt_repeat", 66)
    assert meter.snapshot() == {
        "payload_bytes/prompt_repeat/serialized": 66,
        "payload_bytes/prompt_repeat/serialized_mean_per_call": 66,
        "payload_bytes/prompt_repeat/physical_media": 60,
        "payload_bytes/prompt_repeat/logical_media": 180,
        "payload_bytes/prompt_repeat/estimated_saved": 120,
        "payload_counts/prompt_repeat/physical_segments": 3,
        "payload_counts/prompt_repeat/logical_segments": 9,
        "payload_counts/prompt_repeat/calls": 1,
        "payload_counts/prompt_repeat/pixel_values/physical_segments": 3,
        "payload_counts/prompt_repeat/pixel_values/logical_segments": 9,
        "payload_ratio/prompt_repeat/physical_to_logical": 1 / 3,
    }


def test_without_media_the_ratio_is_one_and_nothing_is_saved() -> None:
    meter = PayloadMeter("media")
    meter.serialized("media_has", 12)
    snapshot = meter.snapshot()
    assert snapshot["payload_ratio/media_has/physical_to_logical"] == 1.0
    assert snapshot["payload_counts/media_has/calls"] == 0
    assert "payload_bytes/media_has/serialized_mean_per_call" not in snapshot
    meter.moved("odd", logical_bytes=1, physical_bytes=5)
    assert meter.snapshot()["payload_bytes/odd/estimated_saved"] == 0


def test_threads_lose_no_count() -> None:
    meter = PayloadMeter("media")

    def work(_: int) -> None:
        for _ in range(500):
            meter.moved("b", logical_bytes=2, physical_bytes=1)
            meter.serialized("b", 3)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    snapshot = meter.snapshot()
    assert snapshot["payload_counts/b/calls"] == 4000
    assert snapshot["payload_bytes/b/logical_media"] == 8000
    assert snapshot["payload_bytes/b/serialized"] == 12_000


def test_prometheus_shows_the_same_by_label() -> None:
    meter, registry = PayloadMeter("media"), CollectorRegistry()
    registry.register(meter)
    meter.moved("media_put", logical_bytes=4, physical_bytes=1, key="frame")
    meter.serialized("media_put", 7)
    text = generate_latest(registry).decode()
    assert 'omnifleet_media_payload_bytes_total{boundary="media_put",kind="logical_media"} 4.0' in text
    assert 'omnifleet_media_payload_counts_total{boundary="media_put",kind="calls"} 1.0' in text
    pieces = 'omnifleet_media_payload_segments_total{boundary="media_put",key="frame",kind="%s_segments"} 1.0'
    assert all(pieces % kind in text for kind in ("physical", "logical"))
    assert 'omnifleet_media_payload_serialized_mean_per_call{boundary="media_put"} 7.0' in text
    assert 'omnifleet_media_payload_physical_to_logical{boundary="media_put"} 0.25' in text


def test_a_boundary_is_named_after_its_method() -> None:
    assert boundary_of("/omnifleet.v1alpha.Media/Put") == "media_put"
