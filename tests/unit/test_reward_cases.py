"""Faults that users of other reward code met, each with its right value: RWD rows of the field cases."""

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict
from omnifleet_reward.service import RewardService, Scored

ANYWHERE = {"places": ["tag", "box", "final", "text"]}
TOWER = r"\boxed{\frac{7^{7^{7^{7^{7}}}}-7}{12}}"
OPTIONS = {"options": [{"A": "cat"}, {"B": "dog"}, {"C": "cow"}, {"D": "hen"}]}


def judge(
    scorer: str,
    response: str,
    truth: str,
    params: dict[str, Any] | None = None,
    extra: dict[str, Any] | None = None,
) -> Verdict:
    term = Registry().reward([ScorerConfig(name=scorer, params=params or {})]).terms[0]
    assert term.scorer.judge is not None
    return term.scorer.judge(Reply(response, truth, extra=extra or {}), term.params)


def math(truth: str, response: str) -> float:
    return judge("math_expr", response, truth, ANYWHERE).score


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[RewardService]:
    async with reward_service(RewardConfig(**settings), Counters("reward")) as service:
        yield service


async def patiently(service: RewardService, scorers: list[ScorerConfig], reply: Reply) -> Scored:
    """As a client would: a machine too busy to tell says so, and is asked again."""
    while True:
        (scored,), _ = await service.score(scorers, [reply])
        if scored.error is None or not scored.error.retryable:
            return scored


@pytest.mark.parametrize("scorer", ["math_expr", "geo3k"])
def test_RWD_01_the_last_box_counts(scorer: str) -> None:
    params = {"places": ["box"]} if scorer == "math_expr" else {}
    reply = r"\boxed{3} wait \boxed{5}"
    assert judge(scorer, reply, "5", params).correct is True
    assert judge(scorer, reply, "3", params).correct is False
    assert judge("math_expr", reply + r" or \boxed{7", "5", {"places": ["box"]}).correct is True


def test_RWD_04_commas_separate_thousands_or_parts_and_nothing_else() -> None:
    assert [math("45678", answer) for answer in ("45,678", "456,78")] == [1, 0]
    assert [math("(3,8)", answer) for answer in ("3,8", "38", "(8,3)")] == [1, 0, 0]


def test_RWD_05_percent() -> None:
    answers = ("35%", "35 percent", "0.35", "35", "0.0035", "3500%")
    assert [math("35%", answer) for answer in answers] == [1, 1, 1, 1, 0, 0]


def test_RWD_07_equal_forms() -> None:
    pairs = [
        ("1/2", "0.5"),
        (r"\sqrt{8}", r"2\sqrt{2}"),
        ("5", "x=5"),
        ("17", r"\text{17}"),
        ("90", r"90^\circ"),
        ("1000", "10^{3}"),
        ("1000", "1{,}000"),
        ("{1,2}", "{2,1}"),
        (r"\{1,2\}", r"\{2,1\}"),
    ]
    assert {pair: math(*pair) for pair in pairs} == dict.fromkeys(pairs, 1)


async def test_RWD_09_a_tower_of_powers_ends_at_the_limit_with_a_mark() -> None:
    scorers = [
        ScorerConfig(name="format", weight=0.1),
        ScorerConfig(name="math_expr", weight=0.9, params={"places": ["box"]}),
    ]
    async with serving(item_timeout_s=2.0) as service:
        scored = await patiently(service, scorers, Reply(f"<answer>{TOWER}</answer>", "4"))
        assert scored.error is None
        assert scored.components == (
            ("format@1", Verdict(0.75)),
            ("math_expr@1", Verdict(0.0, False, Mark.TIMEOUT)),
        )
        assert scored.total.score == pytest.approx(0.075)
        assert (scored.total.correct, scored.total.mark) == (False, Mark.TIMEOUT)
        assert (await patiently(service, scorers, Reply(r"\boxed{4}", "4"))).total.correct is True


async def test_RWD_11_no_scorer_needs_the_main_thread() -> None:
    with ThreadPoolExecutor(1) as threads:
        assert threads.submit(math, "4", "2+2").result() == 1
    assert await asyncio.to_thread(math, "4", "2+2") == 1
    async with serving() as service:  # called from an asynchronous handler
        (scored,), _ = await service.score(
            [ScorerConfig(name="math_expr")], [Reply("<answer>2+2</answer>", "4")]
        )
    assert scored.total.score == 1


def test_RWD_12_markdown_and_maths_around_an_answer() -> None:
    answers = ("Final Answer: **58**", "**58**", "$58$", r"\(58\)")
    assert [math("58", answer) for answer in answers] == [1, 1, 1, 1]
    mode = {"grading_mode": "lenient_answer_colon_md"}
    choices = ("ANSWER: **A**", "ANSWER: $A$")
    assert [judge("mcqa", choice, "A", mode, OPTIONS).score for choice in choices] == [1, 1]


def test_RWD_13_an_article_is_no_option() -> None:
    mode = {"grading_mode": "free_letter"}
    replies = {
        "My choice is C, given a red door.": "C",
        "Answer - **D**": "D",
        "b": "B",
        "Option C looks like a match": "C",
    }
    for reply, letter in replies.items():
        assert [judge("mcqa", reply, truth, mode, OPTIONS).score for truth in "ABCD"] == [
            float(truth == letter) for truth in "ABCD"
        ]


@pytest.mark.parametrize("scorer", ["format", "strict_format"])
def test_RWD_15_line_breaks_inside_the_blocks(scorer: str) -> None:
    assert judge(scorer, "<think>\nx\ny\n</think>\n<answer>9</answer>", "9").score == 1


def test_RWD_17_boxes_in_their_declared_units() -> None:
    sizes = {"image_size": [640, 480], "resized_size": [644, 476]}
    truth = "[160,120,320,240]"

    def iou(box: str, unit: str) -> float:
        params = {"giou_penalty_thres": 0.0, "truth_unit": "pixels", "answer_unit": unit}
        return judge("bbox_giou", f"<answer>{box}</answer>", truth, params, sizes).score

    assert iou("[160,120,320,240]", "pixels") == pytest.approx(1)
    assert iou("[161,119,322,238]", "resized") == pytest.approx(1)
    assert iou("[250,250,500,500]", "per_mille") == pytest.approx(1)
    assert iou("[161,119,322,238]", "pixels") == pytest.approx(18762 / 19597)


async def test_RWD_19_unicode_forms_are_equal_and_a_raising_scorer_is_no_zero(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert judge("exact_text", "cafe\u0301", "caf\u00e9").score == 1
    assert judge("exact_text", " Paris\n", "Paris").score == 1
    (tmp_path / "raising_scorer.py").write_text(
        "def picky(reply):\n    if reply.response == 'bad':\n        raise KeyError('x')\n    return 1.0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    counters = Counters("reward")
    async with reward_service(RewardConfig(modules=("raising_scorer",)), counters) as service:
        scored, _ = await service.score(
            [ScorerConfig(name="raising_scorer:picky")],
            [Reply("good", ""), Reply("bad", ""), Reply("good", "")],
        )
    errors = [item.error.reason if item.error else None for item in scored]
    assert errors == [None, Reason.INTERNAL, None]
    assert scored[1].components == () and scored[1].total.mark is Mark.CRASHED
    assert counters.count("items_unscorable") == 1
