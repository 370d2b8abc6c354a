"""Where each token came from: spans without gaps, whatever the order of refits and continuations."""

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from omnifleet.types import VersionSpan, WeightVersion
from omnifleet_rollout.engine.port import LabelSpan
from omnifleet_rollout.worker.provenance import Provenance

V = [WeightVersion("run", "a", number) for number in range(4)]
LABELS = {str(version): version for version in V}


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 3)), min_size=1, max_size=12))
def test_spans_cover_every_token_once_and_merge(chunks: list[tuple[int, int]]) -> None:
    provenance = Provenance("w")
    expected: list[WeightVersion] = []
    for count, number in chunks:
        provenance.add(count, V[number])
        expected += [V[number]] * count
    spans = provenance.spans
    assert [s.version for s in spans for _ in range(s.start, s.end)] == expected
    assert all(a.end == b.start and a.version != b.version for a, b in pairwise(spans))


def test_the_engines_word_is_final_for_its_own_segment() -> None:
    provenance = Provenance("here", [VersionSpan(V[0], 0, 4, "gone")], 4)
    provenance.start_segment()
    provenance.add(6, V[1])
    agreed = provenance.settle([LabelSpan(str(V[0]), 0, 2), LabelSpan(str(V[1]), 2, 6)], LABELS)
    assert not agreed
    assert [(s.version, s.start, s.end, s.worker) for s in provenance.spans] == [
        (V[0], 0, 4, "gone"),
        (V[0], 4, 6, "here"),
        (V[1], 6, 10, "here"),
    ]


def test_agreement_is_told_from_an_unknown_label() -> None:
    provenance = Provenance("w")
    provenance.start_segment()
    provenance.add(3, V[2])
    assert provenance.settle([LabelSpan(str(V[2]), 0, 3)], LABELS)
    assert not provenance.settle([LabelSpan("stranger", 0, 3)], LABELS)
    assert [(s.version, s.start, s.end) for s in provenance.spans] == [(V[2], 0, 3)]


def test_labels_that_do_not_cover_the_segment_are_not_believed() -> None:
    provenance = Provenance("w")
    provenance.start_segment()
    provenance.add(3, V[2])
    assert not provenance.settle([LabelSpan(str(V[1]), 0, 2)], LABELS)
    assert [(s.version, s.start, s.end) for s in provenance.spans] == [(V[2], 0, 3)]
