"""Placement: bounds hold, sessions stick, load stays even within one request, media pulls."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.client.fleet import WorkerView
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import WorkerState
from omnifleet_rollout.gateway.routing import Ask, Router
from omnifleet_rollout.gateway.sessions import Sessions


def fleet(n: int, max_running: int = 4) -> list[WorkerView]:
    return [WorkerView(id=f"w{i}", state=WorkerState.READY, max_running=max_running) for i in range(n)]


def router(queue_per_worker: int = 4, queue_per_run: int = 100) -> Router:
    homes = Sessions(None, keep=100)
    return Router(queue_per_worker=queue_per_worker, queue_per_run=queue_per_run, homes=homes)


@given(
    workers=st.integers(1, 4),
    asks=st.lists(
        st.tuples(st.sampled_from(["", "s1", "s2", "s3"]), st.sets(st.sampled_from("abcd"), max_size=2)),
        max_size=60,
    ),
)
def test_load_is_bounded_and_even_and_sessions_stick(workers: int, asks: list[tuple[str, set[str]]]) -> None:
    route, views = router(), fleet(workers)
    homes: dict[str, str] = {}
    for session, digests in asks:
        loads = [route.samples(w.id) for w in views]
        ask = Ask("run", session, tuple(digests))
        try:
            chosen = route.place(ask, views)
        except OmnifleetError as error:
            assert error.reason is Reason.OVERLOADED and error.retry_after_ms > 0
            held = route.samples(homes[session]) if session in homes else min(loads)
            assert held == 8, "refused though there is room"
            continue
        if session in homes:
            assert chosen == homes[session]
        else:
            assert route.samples(chosen) <= min(loads) + 1
        if session:
            homes[session] = chosen
        route.take(chosen, digests)
        assert route.samples(chosen) <= 8
    assert sum(route.samples(w.id) for w in views) <= 8 * workers


def test_media_pulls_to_the_worker_that_saw_most_of_it() -> None:
    route, views = router(), fleet(3)
    route.take("w2", ["a", "b"])
    route.give_back("w2")
    route.take("w1", ["a"])
    route.give_back("w1")
    assert route.place(Ask("r", digests=("a", "b")), views) == "w2"
    assert route.place(Ask("r", digests=("c",)), views) == "w0"


def test_media_does_not_pull_to_a_worker_that_is_busier_by_more_than_the_request() -> None:
    route, views = router(), fleet(2)
    for _ in range(3):
        route.take("w1", ["a"])
    assert route.place(Ask("r", digests=("a",), weight=2), views) == "w0"
    assert route.place(Ask("r", digests=("a",), weight=3), views) == "w1"


def test_samples_of_a_request_stay_together_until_the_worker_is_full() -> None:
    route, views = router(queue_per_worker=1, queue_per_run=100), fleet(2, max_running=1)
    route.take("w1")
    assert route.place(Ask("r"), views, prefer="w1") == "w1"
    route.take("w1")
    assert route.place(Ask("r"), views, prefer="w1") == "w0"


def test_a_cordoned_worker_keeps_its_sessions_and_takes_no_new_ones() -> None:
    route, views = router(), fleet(2)
    home = route.place(Ask("r", "s"), views)
    cordoned = [
        WorkerView(id=w.id, state=WorkerState.CORDONED if w.id == home else WorkerState.READY, max_running=4)
        for w in views
    ]
    assert route.place(Ask("r", "s"), cordoned) == home
    assert route.place(Ask("r", "t"), cordoned) != home


def test_a_session_moves_when_its_worker_may_not_serve_and_then_stays() -> None:
    route, views = router(), fleet(2)
    home = route.place(Ask("r", "s"), views)
    other = next(w for w in views if w.id != home)
    assert route.place(Ask("r", "s"), [other]) == other.id
    assert route.place(Ask("r", "s"), views) == other.id
    assert route.place(Ask("other run", "s"), views)


def test_a_run_is_bounded_by_its_quota() -> None:
    route = router(queue_per_run=4)
    route.admit("a", 4)
    with pytest.raises(OmnifleetError) as caught:
        route.admit("a", 1)
    assert caught.value.reason is Reason.OVERLOADED and caught.value.knob == "gateway.queue_per_run"
    route.admit("b", 1)
    route.dismiss("a", 4)
    route.admit("a", 2, quota=2)
    with pytest.raises(OmnifleetError):
        route.admit("a", 1, quota=2)
