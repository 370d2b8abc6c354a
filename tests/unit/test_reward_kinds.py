"""Scorers beyond the reference's: strict form, exact text, numbers, patterns, JSON; and what a reward can reach."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.config.recipe import ScorerConfig
from omnifleet.config.services import RewardConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.telemetry.counters import Counters
from omnifleet.types import Mark
from omnifleet_reward import maths
from omnifleet_reward.assembly import reward_service
from omnifleet_reward.frames import LIMIT_BYTES
from omnifleet_reward.places import AnswerPlace, last_box
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict

SCHEMA = {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}


def judge(scorer: str, response: str, truth: str = "", *, suffix: str = "", **params: Any) -> Verdict:
    term = Registry().reward([ScorerConfig(name=scorer, params=params)]).terms[0]
    assert term.scorer.judge is not None
    return term.scorer.judge(Reply(response, truth, prompt_suffix=suffix), term.params)


def refusal(scorer: str, response: str = "", truth: str = "", **params: Any) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        judge(scorer, response, truth, **params)
    return caught.value


# ---------------------------------------------------------------- form


@pytest.mark.parametrize(
    ("response", "suffix", "score"),
    [
        ("<think>x</think><answer>9</answer>", "", 1),
        (" \n<think></think>\n\n<answer> 9 </answer>\n", "", 1),
        ("<think>x</think><answer>9</answer><|im_end|>\n", "", 1),
        ("<think>x</think><answer>9</answer><|im_end|><|im_end|>", "", 0),
        ("So <think>x</think><answer>9</answer>", "", 0),
        ("<think>x</think>so <answer>9</answer>", "", 0),
        ("<think>x</think><answer>9</answer>.", "", 0),
        ("<think>x</think><answer> </answer>", "", 0),
        ("<think>x</think><answer>9</answer><answer>9</answer>", "", 0),
        ("<think>x</think><think>x</think><answer>9</answer>", "", 0),
        ("<answer>9</answer><think>x</think>", "", 0),
        ("<think><answer>9</think></answer>", "", 0),
        ("x</think><answer>9</answer>", "", 0),
        ("x</think><answer>9</answer>", "assistant\n<think>\n", 1),
        ("<think>x</think><answer>9</answer>", "assistant\n<think>\n", 0),
        ("<answer>9</answer>", "assistant\n<think></think>", 1),
        ("", "", 0),
    ],
)
def test_strict_format(response: str, suffix: str, score: float) -> None:
    assert judge("strict_format", response, suffix=suffix) == Verdict(score, None)


# ---------------------------------------------------------------- places and text


def test_an_answer_is_looked_for_place_by_place() -> None:
    place = AnswerPlace(places=("tag", "box", "final", "fence", "text"))
    assert place.find("<answer> 1 </answer> \\boxed{2}") == "1"
    assert place.find("\\boxed {2} Answer: 3") == "2"
    assert place.find("Answer: 1\nThe final answer is **3**\nbye") == "3"
    assert place.find("```json\n{}\n```\nor\n```\n4\n```") == "4"
    assert place.find(" 5 ") == "5"
    assert AnswerPlace(places=("box",)).find("5") is None


@given(st.text(alphabet="{}\\ab", max_size=40), st.integers(0, 30))
def test_a_whole_box_is_found_whatever_stands_before_it(before: str, depth: int) -> None:
    inner = "{" * depth + "1" + "}" * depth
    assert last_box(f"{before} \\boxed{{{inner}}} \\boxed{{2") == inner


def test_a_megabyte_of_brackets_is_read_in_one_pass() -> None:
    assert last_box("\\boxed{" * 150_000) is None
    assert (
        judge("math_expr", "\\boxed{" + "(" * 1_000_000 + "}", "1", places=["box"]).mark is Mark.UNPARSEABLE
    )
    assert maths.same("1", "(" * 100 + "1" + ")" * 100) is None


def test_exact_text() -> None:
    assert judge("exact_text", "<answer>a\n b</answer>", "a b").correct is True
    assert judge("exact_text", "paris", "Paris").correct is False
    assert judge("exact_text", "PARIS", "Paris", ignore_case=True).correct is True
    assert judge("exact_text", "ﬁn", "fin").correct is False
    assert judge("exact_text", "ﬁn", "fin", form="NFKC").correct is True
    assert judge("exact_text", "x", "x", places=["box"]).mark is Mark.UNPARSEABLE


# ---------------------------------------------------------------- numbers


@pytest.mark.parametrize(
    ("response", "truth", "params", "score"),
    [
        ("about 104.9 cm", "100", {"relative": 0.05}, 1),
        ("105", "100", {"relative": 0.05}, 1),  # the rim counts
        ("105.1", "100", {"relative": 0.05}, 0),
        ("-105", "-100", {"relative": 0.05}, 1),
        ("1,234.5", "1234.5", {}, 1),
        ("3/4", "0.75", {}, 1),
        ("\\frac{3}{4}", "0.75", {}, 1),
        ("12 of 30", "30", {}, 1),  # the last number
        ("75%", "0.75", {}, 1),
        ("75", "75 %", {}, 1),
        ("1e3", "1000", {}, 1),
        ("between 2 and 3", "2", {"absolute": 1}, 1),
        ("v2", "2", {}, 0),
    ],
)
def test_numeric(response: str, truth: str, params: dict[str, Any], score: float) -> None:
    assert judge("numeric", response, truth, places=["text"], **params).score == score


def test_numeric_says_what_it_cannot_read() -> None:
    assert judge("numeric", "<answer>many</answer>", "3").mark is Mark.UNPARSEABLE
    assert judge("numeric", "3", "3").mark is Mark.UNPARSEABLE  # no tag
    assert refusal("numeric", "<answer>3</answer>", "three").reason is Reason.INVALID_REQUEST


@given(st.integers(-(10**12), 10**12), st.integers(1, 10**6))
def test_numbers_equal_themselves_however_written(value: int, divisor: int) -> None:
    forms = [str(value), f"{value:,}", f"{value}.0", f"{value}e0", f"{value * divisor}/{divisor}"]
    assert all(maths.same(a, b) is True for a in forms for b in forms)
    assert maths.same(str(value), str(value + 1)) is False


# ---------------------------------------------------------------- patterns and JSON


def test_regex() -> None:
    assert judge("regex", "12", pattern=r"^\d+$").correct is True
    assert judge("regex", "a12", pattern=r"\d+", whole=True).correct is False
    two = "Answer: dog\nAnswer: Cat"
    assert judge("regex", two, " Cat", pattern=r"Answer: (\w+)", group=1).correct is True
    assert judge("regex", two, "cat", pattern=r"answer: (?P<x>\w+)", group="x", ignore_case=True).correct
    assert judge("regex", "none", "cat", pattern=r"Answer: (\w+)", group=1).mark is Mark.UNPARSEABLE
    assert "regular expression" in refusal("regex", pattern="(").message
    assert "group 2" in refusal("regex", pattern="(x)", group=2).message


def test_json_schema() -> None:
    assert judge("json_schema", '{"x": 1}', document_schema=SCHEMA).correct is True
    assert judge("json_schema", 'so\n```json\n{"x": 1}\n```', document_schema=SCHEMA).correct is True
    assert judge("json_schema", '{"x": "1"}', document_schema=SCHEMA) == Verdict(0.0, False)
    assert judge("json_schema", "x = 1", document_schema=SCHEMA).mark is Mark.UNPARSEABLE
    assert judge("json_schema", "[" * 200_000, document_schema=SCHEMA).mark is Mark.UNPARSEABLE
    assert judge("json_schema", '{"x": NaN}', document_schema={}).mark is Mark.UNPARSEABLE
    equal: dict[str, Any] = {"document_schema": SCHEMA, "equals_reference": True}
    assert judge("json_schema", '{"y": 2, "x": 1.0}', '{"x": 1, "y": 2}', **equal).correct is True
    assert judge("json_schema", '{"x": 1}', '{"x": true}', **equal).correct is False
    assert "not a JSON schema" in refusal("json_schema", document_schema={"type": "thing"}).message


def test_a_schema_leads_to_no_other_address() -> None:
    with pytest.raises(ValueError, match="not in it"):
        judge("json_schema", "1", document_schema={"$ref": "http://127.0.0.1:1/schema"})


# ---------------------------------------------------------------- what can be reached


REACHED: list[tuple[list[tuple[str, float, dict[str, Any]]], str, float]] = [
    ([("format", 0.2, {}), ("exact_alnum", 0.8, {})], "", 1.0),
    ([("format", 0.2, {}), ("exact_alnum", 0.8, {})], "<think>\n", 0.95),
    ([("geo3k", 1.0, {})], "<think>\n", 1.0),  # its form needs the end of the thoughts only
    ([("geo3k", 1.0, {})], "<think></think>", 0.9),
    ([("format", 0.1, {}), ("math_expr", 0.9, {})], "<think>\n", 0.975),
    ([("format", 0.1, {}), ("bbox_giou", 0.9, {"giou_penalty_thres": 0.5})], "", 1.0),
    ([("strict_format", 0.5, {}), ("numeric", 0.5, {"places": ["text"]})], "<think>", 1.0),
    ([("mcqa", 1.0, {}), ("format", 1.0, {})], "", 1.0),
    ([("click", 1.0, {})], "", 1.0),
    ([("regex", 1.0, {"pattern": "b+", "example": "abb"})], "", 1.0),
    ([("json_schema", 1.0, {"document_schema": {**SCHEMA, "examples": [{"x": 1}]}})], "", 1.0),
]


async def test_the_reachable_maximum_of_each_combination() -> None:
    async with reward_service(RewardConfig(item_timeout_s=60), Counters("reward")) as service:
        for scorers, suffix, maximum in REACHED:
            configs = [
                ScorerConfig(name=name, weight=weight, params=params) for name, weight, params in scorers
            ]
            reached = await service.reachable(configs, suffix)
            assert reached.maximum == pytest.approx(maximum), scorers
        for unknown in (
            ScorerConfig(name="regex", params={"pattern": "b"}),
            ScorerConfig(name="judge", params={"endpoint": "x"}),
        ):
            with pytest.raises(OmnifleetError) as caught:
                await service.reachable([unknown], "")
            assert caught.value.reason is Reason.UNSUPPORTED


def test_every_scorer_says_what_it_does_and_has_examples() -> None:
    for scorer in Registry().known():
        made = scorer.judge or scorer.ask
        assert made is not None and "→" in (made.__doc__ or ""), scorer.name
        assert (scorer.judge is None) != (scorer.ask is None)
        assert scorer.doc.endswith(".")


def test_frames_hold_any_message() -> None:
    from omnifleet.wire.server import MESSAGE_BYTES

    assert LIMIT_BYTES == 2 * MESSAGE_BYTES
