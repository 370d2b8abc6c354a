"""Judges and remote scorers against a local endpoint: cache, budget, bounded concurrency, faults."""

import asyncio
import contextlib
import json
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet_reward.answers import Answers
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.network import Endpoints
from omnifleet_reward.pool import Pool
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply
from omnifleet_reward.service import RewardService, Scored

Answer = tuple[int, Any]


class Endpoint:
    """A server whose answers a test decides. `seen`: bodies in the order of arrival; `most`: requests at once."""

    def __init__(self) -> None:
        self.answer: Callable[[dict[str, Any]], Answer] = lambda body: (200, grade(7))
        self.seen: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.most = 0
        self._now = 0
        self._lock = threading.Lock()

    def handle(self, body: dict[str, Any], key: str) -> Answer:
        with self._lock:
            self.seen.append(body)
            self.keys.append(key)
            self._now += 1
            self.most = max(self.most, self._now)
        try:
            return self.answer(body)
        finally:
            with self._lock:
                self._now -= 1


def completion(text: str, tokens: int = 10) -> dict[str, Any]:
    """A chat completion."""
    return {"choices": [{"message": {"content": text}}], "usage": {"total_tokens": tokens}}


def grade(value: float) -> dict[str, Any]:
    """A chat completion that ends in a grade."""
    return completion(f"Looks like GRADE: 1 at first.\nGRADE: {value}")


@pytest.fixture
def endpoint() -> Iterator[tuple[Endpoint, str]]:
    """A running endpoint and its address."""
    made = Endpoint()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, answer = made.handle(body, self.headers.get("authorization", ""))
            text = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(text)))
            self.send_header("retry-after", "0")
            self.end_headers()
            with contextlib.suppress(ConnectionError):  # a client that had enough
                self.wfile.write(text)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield made, f"http://127.0.0.1:{server.server_address[1]}/v1/chat/completions"
    server.shutdown()
    server.server_close()
    thread.join(10)


def config_of(url: str, **limits: Any) -> RewardConfig:
    return RewardConfig.model_validate({"endpoints": {"x": {"url": url, "model": "m", **limits}}})


@asynccontextmanager
async def serving(url: str, run_dir: Path | None = None, **limits: Any) -> AsyncIterator[RewardService]:
    """A service without scorer processes."""
    config, counters = config_of(url, **limits), Counters("reward")
    answers = Answers(run_dir / "answers.sqlite" if run_dir else None, config.answers_kept)
    async with Endpoints(config, answers, counters) as network:
        yield RewardService(config, Registry(), Pool(config, counters), network, counters)


async def scores(
    service: RewardService, *responses: str, scorer: str = "judge", **params: Any
) -> list[Scored]:
    replies = [Reply(response, "truth", prompt="question {response}") for response in responses]
    config = ScorerConfig(name=scorer, params={"endpoint": "x", **params})
    results: list[Scored] = (await service.score([config], replies))[0]
    return results


def reason(scored: Scored) -> Reason | None:
    return scored.error.reason if scored.error else None


async def test_a_judge_is_asked_and_its_last_grade_counts(
    endpoint: tuple[Endpoint, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, url = endpoint
    monkeypatch.setenv("JUDGE_KEY", "secret")
    async with serving(url, key_env="JUDGE_KEY") as service:
        (scored,) = await scores(service, "a reply with {ground_truth}")
    assert (scored.total.score, scored.total.correct) == (pytest.approx(0.7), True)
    assert server.keys == ["Bearer secret"]
    body = server.seen[0]
    assert body["model"] == "m" and body["temperature"] == 0
    question = body["messages"][1]["content"]
    assert "a reply with {ground_truth}" in question and "question {response}" in question  # filled in once


async def test_the_same_is_asked_once_over_restarts(endpoint: tuple[Endpoint, str], tmp_path: Path) -> None:
    server, url = endpoint
    for _ in range(2):
        async with serving(url, tmp_path) as service:
            results = await scores(service, "same", "same", "same", "other")
        assert [scored.total.score for scored in results] == [pytest.approx(0.7)] * 4
    assert len(server.seen) == 2
    async with serving(url, tmp_path, cached=False) as service:
        await scores(service, "same", "same")
    assert len(server.seen) == 4


async def test_a_spent_budget_makes_items_unscorable_over_restarts(
    endpoint: tuple[Endpoint, str], tmp_path: Path
) -> None:
    server, url = endpoint
    async with serving(url, tmp_path, budget_calls=3, concurrency=1) as service:
        results = await scores(service, *"abcde")
    assert sorted(str(reason(scored)) for scored in results) == ["None"] * 3 + ["forbidden"] * 2
    refused = next(scored.error for scored in results if scored.error)
    assert refused.knob == "reward_service.endpoints.x.budget_calls" and not refused.retryable
    async with serving(url, tmp_path, budget_calls=3) as service:
        known, new = await scores(service, "a", "f")
        assert reason(known) is None and reason(new) is Reason.FORBIDDEN  # what is known costs nothing
    assert len(server.seen) == 3
    async with serving(url, tmp_path, budget_tokens=30) as service:
        (spent,) = await scores(service, "g")
    assert spent.error is not None and spent.error.knob.endswith("budget_tokens")


async def test_requests_at_once_are_bounded_and_hold_no_process(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    gate = threading.Event()

    def wait(body: dict[str, Any]) -> Answer:
        assert gate.wait(60)
        return 200, grade(10)

    server.answer = wait
    async with reward_service(config_of(url, concurrency=3), Counters("reward")) as service:
        asked = asyncio.create_task(scores(service, *(f"reply {n}" for n in range(12))))
        async with asyncio.timeout(30):
            while len(server.seen) < 3:  # noqa: ASYNC110 - the state is the server's
                await asyncio.sleep(0.01)
        # the only scorer process is free while the judge is waited for
        quick, _ = await service.score([ScorerConfig(name="exact_text")], [Reply("x", "x")])
        assert quick[0].total.correct is True and not asked.done()
        gate.set()
        assert [scored.total.score for scored in await asked] == [1.0] * 12
    assert server.most == 3


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([(500, {}), (429, {}), (200, grade(5))], None),
        ([(200, completion("no idea")), (200, b"no json"), (200, grade(11)), (200, grade(5))], None),
        ([(500, {})], Reason.UNAVAILABLE),
        ([(200, completion("no idea"))], Reason.INTERNAL),
        ([(200, {"choices": []})], Reason.INTERNAL),
        ([(401, {"error": "who?"})], Reason.INVALID_CONFIG),
        ([(302, {})], Reason.INVALID_CONFIG),
        ([(200, b"x" * (2 << 20))], Reason.INTERNAL),
    ],
)
async def test_faults_are_waited_out_or_told_and_never_a_zero(
    endpoint: tuple[Endpoint, str], answers: list[Answer], expected: Reason | None
) -> None:
    server, url = endpoint
    server.answer = lambda body: answers[min(len(server.seen), len(answers)) - 1]
    async with serving(url, attempts=4) as service:
        (scored,) = await scores(service, "x")
    assert reason(scored) is expected
    assert scored.total.score == (0.5 if expected is None else 0.0)
    if expected is Reason.INVALID_CONFIG:
        assert len(server.seen) == 1
    else:
        assert len(server.seen) == (len(answers) if expected is None else 4)


async def test_a_silent_endpoint_ends_at_its_deadline(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    gate = threading.Event()
    server.answer = lambda body: (200 if gate.wait(60) else 500, grade(5))
    async with serving(url, timeout_s=0.2, attempts=2) as service:
        (scored,) = await scores(service, "x")
        gate.set()
    assert reason(scored) is Reason.UNAVAILABLE and scored.error and scored.error.retryable


async def test_only_configured_endpoints_are_asked(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    async with serving(url) as service:
        (unknown,) = await scores(service, "x", endpoint="http://127.0.0.1:1")
        assert reason(unknown) is Reason.INVALID_REQUEST and "known: x" in str(unknown.error)
    async with serving(url, key_env="NO_SUCH_KEY_HERE") as service:
        (keyless,) = await scores(service, "x")
        assert reason(keyless) is Reason.INVALID_CONFIG
    assert server.seen == []


async def test_a_remote_scorer(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    answers: dict[str, Any] = {
        "good": {"score": 0.25, "correct": False},
        "bare": {"score": 1},
        "vague": {"score": 0, "correct": False, "mark": "unparseable"},
        "nan": b'{"score": NaN}',
        "none": {"score": None},
    }
    server.answer = lambda body: (200, answers[body["response"]])
    async with serving(url, attempts=1) as service:
        results = await scores(service, *answers, scorer="remote", options={"strict": True})
    totals = [(s.total.score, s.total.correct, s.total.mark) for s in results if s.error is None]
    assert totals == [(0.25, False, Mark.SCORED), (1.0, None, Mark.SCORED), (0.0, False, Mark.UNPARSEABLE)]
    assert [reason(scored) for scored in results[3:]] == [Reason.INTERNAL] * 2
    sent = next(body for body in server.seen if body["response"] == "good")
    assert sent["options"] == {"strict": True} and sent["ground_truth"] == "truth"


async def test_what_is_unscorable_in_a_process_is_not_paid_for(endpoint: tuple[Endpoint, str]) -> None:
    server, url = endpoint
    async with reward_service(config_of(url), Counters("reward")) as service:
        scorers = [ScorerConfig(name="numeric"), ScorerConfig(name="judge", params={"endpoint": "x"})]
        (scored,), _ = await service.score(scorers, [Reply("<answer>3</answer>", "three")])
        assert reason(scored) is Reason.INVALID_REQUEST and server.seen == []
        (scored,), _ = await service.score(scorers, [Reply("<answer>3</answer>", "3")])
    assert [label for label, _ in scored.components] == ["numeric@1", "judge@1"]
    assert scored.total.score == pytest.approx(0.85)


def test_a_judge_that_cannot_be_read_is_refused_before_it_is_asked() -> None:
    for params in ({"pattern": "GRADE"}, {"pattern": "("}, {"low": 1, "high": 1}, {}):
        with pytest.raises(OmnifleetError):
            base = {} if not params else {"endpoint": "x"}
            Registry().reward([ScorerConfig(name="judge", params={**base, **params})])
