"""Cutting a version for the ranks that read it: each slice once, to whom it concerns, and only where that saves bytes."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from omnifleet.types import WeightVersion
from omnifleet.wire.fold import fold_digest
from omnifleet.wire.manifest import manifest_body
from omnifleet_refit.windows import Needs, View, needs_body, needs_of
from omnifleet_rollout.refit.pieces import legs_of
from omnifleet_trainer.refit.choice import Taker, choose
from omnifleet_trainer.refit.parts import Cut, bytes_of_rank, cut_shipment, parts_of, told
from omnifleet_trainer.refit.snapshot import Snapshot

CPU = torch.device("cpu")
ROWS, COLUMNS, RANKS = 6, 10, 3
VERSION, PARENT = WeightVersion("r", "l", 1), WeightVersion("r", "l", 0, "0" * 64)


def packed(shape: tuple[int, int] = (ROWS, COLUMNS), bucket_bytes: int = 3 * 4096) -> Snapshot:
    snapshot = Snapshot(CPU, bucket_bytes)
    weights = {name: torch.randn(shape) for name in "abc"} | {"d": torch.randn(shape).bfloat16()}
    snapshot.pack(weights.items(), set("abcd"))
    return snapshot


@st.composite
def windows(draw: st.DrawFn) -> View:
    """A rectangle of a matrix, as it lies or turned."""
    top, left = draw(st.integers(0, ROWS - 1)), draw(st.integers(0, COLUMNS - 1))
    height, width = draw(st.integers(1, ROWS - top)), draw(st.integers(1, COLUMNS - left))
    shape, stride = (height, width), (COLUMNS, 1)
    if draw(st.booleans()):
        shape, stride = shape[::-1], stride[::-1]
    return View(top * COLUMNS + left, shape, stride)


all_needs = st.lists(
    st.dictionaries(st.sampled_from("abcd"), st.lists(windows(), min_size=1, max_size=3, unique=True)),
    min_size=RANKS,
    max_size=RANKS,
)


@given(all_needs, st.sets(st.sampled_from("abcd"), min_size=1))
@settings(max_examples=60, deadline=None)
def test_each_rank_is_sent_what_it_reads_of_what_changed_and_nothing_twice(
    ranks: Sequence[Needs], changed: set[str]
) -> None:
    snapshot = packed()
    parts = parts_of(snapshot, changed, ranks)
    assume(parts)
    sent = [(piece.name, piece.view) for part in parts for piece in part.slices]
    assert len(sent) == len(set(sent)), "each slice leaves the sender once"
    shipment = cut_shipment(snapshot, VERSION, PARENT, changed, parts, told(snapshot, parts), False)
    body = manifest_body(shipment.manifest)
    for rank, needs in enumerate(ranks):
        legs = legs_of(body, rank, needs)  # refuses what is missing, twice or foreign
        for leg in legs:
            cut = Cut(parts[leg.number], snapshot, CPU)
            for bucket, data in zip(leg.buckets, cut, strict=True):
                for entry in bucket.tensors:
                    name, view = leg.keys[entry["name"]]
                    window = view.on(snapshot.tensor(name), snapshot.tensor(name).storage_offset())
                    raw = data[entry["offset"] : entry["offset"] + entry["bytes"]]
                    assert torch.equal(raw.view(window.dtype).view(window.shape), window)
                    assert entry["digest"] == fold_digest(raw.numpy().tobytes())
    assert [needs_of(needs_body(needs)) for needs in ranks] == [
        {name: list(views) for name, views in needs.items()} for needs in ranks
    ]


def halves(snapshot: Snapshot, axis: int = 0) -> list[Needs]:
    """What two ranks read that split every matrix."""
    whole = {name: torch.empty(place.shape) for name, place in snapshot.places.items()}
    return [{name: [View.of(t.chunk(2, axis)[rank])] for name, t in whole.items()} for rank in range(2)]


@pytest.mark.parametrize("axis", [0, 1])
def test_parts_are_chosen_where_ranks_take_less_and_the_sender_sends_no_more(axis: int) -> None:
    snapshot = packed((64, 256), 1 << 20)
    needs = halves(snapshot, axis)
    held = dict(snapshot.digests) | {"a": "", "b": ""}
    takers = {"w": Taker(PARENT, held, False)}
    shipment = choose(snapshot, VERSION, takers, needs, False)["w"]
    assert [part.ranks for part in shipment.parts] == [(0,), (1,)]
    assert shipment.bytes == 2 * 64 * 256 * 4, "of a bucket the two that changed, and nothing else"
    assert bytes_of_rank(shipment.parts) == shipment.bytes // 2
    assert {spec.name for spec in shipment.manifest.tensors if spec.changed} == {"a", "b"}
    assert shipment.manifest.HasField("parent") and not shipment.manifest.buckets


def test_whole_tensors_are_chosen_where_parts_save_nothing() -> None:
    snapshot = packed((64, 256), 1 << 20)
    needs, held = halves(snapshot), dict(snapshot.digests) | {"a": ""}
    everything = [{name: [View.of(torch.empty(place.shape))] for name, place in snapshot.places.items()}] * 2
    overlapping = [halves(snapshot, axis)[0] | {"b": [View(0, (64, 200), (256, 1))]} for axis in (0, 1)]
    beyond = [{"a": [View(1, (64, 256), (256, 1))]}, {}]
    late = {"w": Taker(PARENT, held, False), "late": Taker(None, None, False)}
    for takers, ranks in (
        ({"w": Taker(PARENT, held, False)}, []),
        ({"w": Taker(PARENT, {}, False)}, everything),
        ({"w": Taker(PARENT, {}, False)}, [overlapping[0], needs[0], needs[1], overlapping[1]] * 2),
        ({"w": Taker(PARENT, held, False)}, beyond),
        (late, needs),
    ):
        shipments = choose(snapshot, VERSION, takers, ranks, False)
        assert all(shipment.buckets and not shipment.parts for shipment in shipments.values())
