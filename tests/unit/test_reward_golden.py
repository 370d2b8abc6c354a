"""The reference's six tasks: replies as their models give them, rewards worked out by hand."""

from typing import Any

import pytest

from omnifleet.config.recipe import ScorerConfig
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict

Scorers = list[tuple[str, float, dict[str, Any]]]

CLEVR: Scorers = [("format", 0.2, {}), ("exact_alnum", 0.8, {})]
MMPR: Scorers = [("geo3k", 1.0, {"format_score": 0.1})]
GEOMETRY: Scorers = [("format", 0.1, {}), ("math_expr", 0.9, {})]
REFCOCO: Scorers = [("format", 0.1, {}), ("bbox_giou", 0.9, {"giou_penalty_thres": 0.5})]
MCQA: Scorers = [("mcqa", 1.0, {})]
CLICK: Scorers = [("click", 1.0, {})]

ANIMALS = {"options": [{"A": "a cat"}, {"B": "a dog"}, {"C": None}, {"D": "a hen"}]}
CIRCLES = {
    "circles": [
        {"color": "red", "x": 500, "y": 400, "radius": 60},
        {"color": "blue", "x": 100, "y": 100, "radius": 80},
    ],
    "target_color": "red",
}


def reward(scorers: Scorers, response: str, truth: str, extra: dict[str, Any] | None = None) -> Verdict:
    """The combined verdict."""
    built = Registry().reward([ScorerConfig(name=n, weight=w, params=p) for n, w, p in scorers])
    reply = Reply(response, truth, extra=extra or {})
    return built.total([term.scorer.judge(reply, term.params) for term in built.terms if term.scorer.judge])


@pytest.mark.parametrize(
    ("response", "truth", "score", "correct"),
    [
        ("<think>two</think><answer>2</answer>", "2", 1.0, True),
        ("two</think>\n<answer>2</answer>", "2", 0.95, True),  # 0.2·0.75 + 0.8: the template opened the tag
        ("two</think>\n<answer>3</answer>", "2", 0.15, False),
        ("two</think> 2", "2", 0.0, False),
        ("<think>it is</think><answer> Yes.</answer>", "yes", 1.0, True),
        ("<think>it is</think> yes", "yes", 0.05, False),  # 0.2·0.25
    ],
)
def test_clevr(response: str, truth: str, score: float, correct: bool) -> None:
    verdict = reward(CLEVR, response, truth)
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is correct


@pytest.mark.parametrize(
    ("response", "truth", "score"),
    [
        ("so</think> \\boxed{\\frac{1}{2}}", "0.5", 1.0),
        ("\\boxed{5}", "5", 0.9),  # no end of thoughts
        ("so</think> \\boxed{4}", "5", 0.1),
        ("\\boxed{5} so</think> that is it", "5", 0.9),  # box before the end of thoughts
        ("so</think> \\boxed{5} no, \\boxed{6}", "5", 0.1),  # the last box
        ("so</think> \\boxed{5} and \\boxed{6", "5", 0.1),  # the last never closes, the form is there
        ("so</think> \\boxed{\\text{B}}", "B", 1.0),
        ("so</think> 5", "5", 0.0),
        ("so</think> \\boxed{90^\\circ}", "90", 1.0),
    ],
)
def test_mmpr_tiny(response: str, truth: str, score: float) -> None:
    verdict = reward(MMPR, response, truth)
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is (score >= 0.9)


@pytest.mark.parametrize(
    ("response", "truth", "score", "correct"),
    [
        ("<think>x</think><answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 1.0, True),
        ("x</think><answer>2\\sqrt{2}</answer>", "\\sqrt{8}", 0.975, True),  # 0.1·0.75 + 0.9
        ("x</think><answer>3</answer>", "\\sqrt{8}", 0.075, False),
        ("x</think> \\boxed{3}", "3", 0.0, False),  # the answer's tag is asked for
        ("<think>x</think><answer>\\boxed{3}</answer>", "3", 1.0, True),
    ],
)
def test_geometry3k(response: str, truth: str, score: float, correct: bool) -> None:
    verdict = reward(GEOMETRY, response, truth)
    assert verdict.score == pytest.approx(score)
    assert verdict.correct is correct


@pytest.mark.parametrize(
    ("box", "part", "correct"),
    [
        ("[100,100,300,300]", 1.0, True),
        ("100, 100, 300, 300", 1.0, True),
        ("[100,100,300,250]", 0.75, True),  # 150/200
        ("[100,100,300,200]", 0.5, False),  # IoU 0.5: not above 0.5
        # I 10000, U 70000, C 90000: 1/7 - 2/9
        ("[200,200,400,400]", 1 / 7 - 2 / 9, False),
        # apart: I 0, U 40000 + 10000, C 400·400 = 160000: -(110000/160000)
        ("[400,400,500,500]", -11 / 16, False),
        ("[100,100,300]", 0.0, False),
        ("somewhere", 0.0, False),
        ("[300,300,100,100]", 0.0, False),  # the reference's formula gives 1 for swapped corners
        ("[nan,100,300,300]", 0.0, False),
    ],
)
def test_refcoco(box: str, part: float, correct: bool) -> None:
    verdict = reward(REFCOCO, f"<think>x</think><answer>{box}</answer>", "[100,100,300,300]")
    assert verdict.score == pytest.approx(0.1 + 0.9 * part)
    assert verdict.correct is correct


def test_giou_by_default_and_without_a_tag() -> None:
    default: Scorers = [("bbox_giou", 1.0, {})]
    # I 10000, U 40000, C 40000: IoU 0.25, hull no larger than the union
    assert reward(default, "<answer>[0,0,100,100]</answer>", "[0,0,200,200]").score == pytest.approx(0.25)
    # IoU 2/3 is above 0.5, still GIoU: I 20000, U 30000, C 30000
    assert reward(default, "<answer>[0,0,100,200]</answer>", "[0,0,100,300]").score == pytest.approx(2 / 3)
    assert reward(default, "[0,0,200,200]", "[0,0,200,200]").score == 0
    assert reward(default, "<answer>[0,0,0,0]</answer>", "[0,0,0,0]").score == 0  # both areas at least 0.001


@pytest.mark.parametrize(
    ("mode", "response", "truth", "score"),
    [
        ("strict_single_letter_boxed", "\\boxed{B}", "B", 1),
        ("strict_single_letter_boxed", "\\boxed{ [B] }", "b", 1),
        ("strict_single_letter_boxed", "\\boxed{\\text{ (B) }}", "B", 1),
        ("strict_single_letter_boxed", "\\boxed{B: a dog}", "B", 1),
        ("strict_single_letter_boxed", "\\boxed{A} no \\boxed{B}", "B", 1),
        ("strict_single_letter_boxed", "\\boxed{A} no \\boxed{B", "B", 0),
        ("strict_single_letter_boxed", "\\boxed{b}", "B", 0),
        ("strict_single_letter_boxed", "\\boxed{a dog}", "B", 0),
        ("strict_single_letter_boxed", "\\boxed{C}", "C", 0),  # an option without text is none
        ("strict_single_letter_boxed", "B", "B", 0),
        ("lenient_boxed", "\\boxed{it is A Dog}", "B", 1),
        ("lenient_boxed", "\\boxed{a cat or a dog}", "B", 0),
        ("lenient_boxed", "a dog", "B", 0),
        ("lenient_answer_colon", "ANSWER: b", "B", 1),
        ("lenient_answer_colon", "Answer: \\text{A  dog}", "B", 1),
        ("lenient_answer_colon", "Answer: A\nAnswer: B", "B", 0),  # the first
        ("lenient_answer_colon", "Answer: B because", "B", 0),
        ("lenient_answer_colon_md", "Answer: A\n**Answer:** B because", "B", 1),  # the last
        ("lenient_answer_colon_md", "**Answer: B**", "B", 1),
        ("lenient_answer_colon_md", "Answer: A or B", "B", 0),
        ("lenient_answer_colon_md", "Answer: B\nAnswer: none", "B", 1),
        ("lenient_answer_colon_md", "\\boxed{B}", "B", 0),
    ],
)
def test_mcqa_modes(mode: str, response: str, truth: str, score: float) -> None:
    assert reward(MCQA, response, truth, {**ANIMALS, "grading_mode": mode}).score == score
    by_server: Scorers = [("mcqa", 1.0, {"grading_mode": mode})]
    row = {**ANIMALS, "grading_mode": "free_letter"}  # the server's mode overrides the row's
    assert reward(by_server, response, truth, row).score == score


def test_mcqa_patterns_of_the_row_come_first() -> None:
    row = {**ANIMALS, "template_metadata": {"output_regex": [r"never (\w)", r"pick\W+(\w+ ?\w*)"]}}
    assert reward(MCQA, "pick: A, pick: B", "B", row).score == 1
    assert reward(MCQA, "pick: a dog", "B", row).score == 1
    assert reward(MCQA, "no word of it, \\boxed{B}", "B", row).score == 1
    prefixed = {**ANIMALS, "template_metadata": {"answer_prefix": "Réponse :"}}
    md: Scorers = [("mcqa", 1.0, {"grading_mode": "lenient_answer_colon_md"})]
    assert reward(md, "Réponse : B", "B", prefixed).score == 1
    assert reward(md, "\\boxed{B}", "B", prefixed).score == 1


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("click(500, 400)", 1),
        ("I click(x=536, y=448) there", 1),  # 36-48-60: on the rim
        ("click(537, 448)", 0),
        ("click(100, 100)", 0),  # the blue one
        ("click(0, 0) click(500, 400)", 0),  # the first
        ('<tool_call>\n{"name": "click", "arguments": {"x": 510, "y": 410}}\n</tool_call>', 1),
        ('{"name": "click", "arguments": "{\\"x\\": \\"510\\", \\"y\\": 410.9}"}', 1),
        ("<function=click><parameter=x>500</parameter><parameter=y>\n400\n</parameter></function>", 1),
        ('<tool_call>{"name": "click", "arguments": {"x": 510}}</tool_call>', 0),
        ("the red one", 0),
    ],
)
def test_circle_click(response: str, score: float) -> None:
    assert reward(CLICK, response, "", CIRCLES).score == score
