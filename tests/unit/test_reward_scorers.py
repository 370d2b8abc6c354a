"""Scores by hand: the built-in scorers, their combination, versions and the reachable maximum's examples."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from omnifleet.config.recipe import ScorerConfig
from omnifleet.errors import OmnifleetError, Reason
from omnifleet.types import Mark
from omnifleet_reward.registry import Registry
from omnifleet_reward.scorer import Reply, Verdict
from omnifleet_reward.scorers import exact_alnum, format

CLEVR = (ScorerConfig(name="format", weight=0.2), ScorerConfig(name="exact_alnum", weight=0.8))


def judge(scorer: str, response: str, truth: str = "", **params: str) -> Verdict:
    """The verdict of one built-in scorer."""
    term = Registry().reward([ScorerConfig(name=scorer, params=params)]).terms[0]
    assert term.scorer.judge is not None
    return term.scorer.judge(Reply(response, truth), term.params)


@pytest.mark.parametrize(
    ("response", "score"),
    [
        ("<think>x</think><answer>9</answer>", 1.0),
        ("<think>\nx\ny\n</think>\n<answer>9</answer>", 1.0),  # RWD-15: line breaks
        ("<answer>9</answer><think>x</think>", 1.0),  # order is not asked for
        ("<think></think><answer></answer>", 1.0),
        ("x</think><answer>9</answer>", 0.75),  # the template opened the tag
        ("<think>x</think>", 0.25),
        ("</think>x<think>", 0.0),
        ("<answer>9", 0.0),
        ("9", 0.0),
        ("", 0.0),
        ("<THINK>x</THINK><Answer>9</Answer>", 0.0),
    ],
)
def test_format_gives_a_quarter_and_three_quarters(response: str, score: float) -> None:
    assert judge("format", response) == Verdict(score, None)


@pytest.mark.parametrize(
    ("response", "truth", "correct"),
    [
        ("<answer>9</answer>", "9", True),
        ("so <answer> Yes. </answer>", "yes", True),
        ("<answer>Red-Cube!</answer>", "red cube", True),
        ("<answer>\n1,234\n</answer>", "1234", True),
        ("<answer> Paris\n</answer>", "Paris", True),
        ("<answer>1</answer> or <answer>2</answer>", "2", False),  # greedy: "1</answer> or <answer>2"
        ("<answer>1</answer> or <answer>2</answer>", "1 answer or answer 2", True),
        ("<answer>9", "9", False),
        ("9</answer>", "9", False),
        ("</answer>9<answer>", "9", False),
        ("9", "9", False),
        ("<answer>90</answer>", "9", False),
        ("<answer>...</answer>", "!", True),  # both reduce to nothing
    ],
)
def test_exact_alnum_compares_letters_and_digits(response: str, truth: str, correct: bool) -> None:
    verdict = judge("exact_alnum", response, truth)
    assert (verdict.score, verdict.correct) == (float(correct), correct)
    has_answer = "<answer>" in response.partition("</answer>")[0] and "</answer>" in response
    assert (verdict.mark is Mark.SCORED) == has_answer


@given(st.text(), st.text())
def test_exact_alnum_ignores_what_is_no_letter_or_digit(before: str, answer: str) -> None:
    before = before.replace("<", "")
    answer = answer.replace("<", "")
    noisy = f"{before}<answer> -{answer}!\n</answer>"
    assert judge("exact_alnum", noisy, answer).correct is True


def test_tags_are_parameters() -> None:
    assert judge("format", "<t>x</t><a>1</a>", think_tag="t", answer_tag="a").score == 1.0
    assert judge("exact_alnum", "<a.>1</a.>", "1", answer_tag="a.").correct is True
    assert judge("format", "<ab>1</ab>", answer_tag="a.").score == 0.0  # a tag is text, not a pattern


def test_weights_are_normalised_and_correct_is_the_and_of_opinions() -> None:
    reward = Registry().reward(
        [ScorerConfig(name="format", weight=1), ScorerConfig(name="exact_alnum", weight=4)]
    )
    assert [term.weight for term in reward.terms] == [0.2, 0.8]
    assert reward.total([Verdict(0.75), Verdict(1.0, True)]) == Verdict(pytest.approx(0.95), True)
    assert reward.total([Verdict(0.25, False), Verdict(1.0, True)]) == Verdict(pytest.approx(0.85), False)
    assert reward.total([Verdict(1.0), Verdict(0.0)]).correct is None


def test_reward_version_follows_weights_and_parameters_only() -> None:
    registry = Registry()
    version = registry.reward(CLEVR).version
    assert version.startswith("exact_alnum@1+format@1#")
    assert registry.reward(CLEVR[::-1]).version == version
    scaled = [ScorerConfig(name="format", weight=0.1), ScorerConfig(name="exact_alnum", weight=0.4)]
    assert registry.reward(scaled).version == version
    spelled = [
        CLEVR[0],
        ScorerConfig(name="exact_alnum", version="1", weight=0.8, params={"answer_tag": "answer"}),
    ]
    assert registry.reward(spelled).version == version
    assert registry.reward([CLEVR[0], ScorerConfig(name="exact_alnum", weight=0.7)]).version != version
    other_tag = ScorerConfig(name="exact_alnum", weight=0.8, params={"answer_tag": "a"})
    assert registry.reward([CLEVR[0], other_tag]).version != version


@pytest.mark.parametrize(
    ("suffix", "maximum"),
    [
        ("", 1.0),
        ("<|im_start|>assistant\n", 1.0),
        ("<|im_start|>assistant\n<think>\n", 0.95),  # 0.2 · 0.75 + 0.8
        ("<|im_start|>assistant\n<think></think>", 0.95),
    ],
)
def test_examples_know_a_template_that_opens_the_think_tag(suffix: str, maximum: float) -> None:
    reward = Registry().reward(CLEVR)
    (reply,) = format.examples(suffix, format.Params())
    verdicts = [term.scorer.judge(reply, term.params) for term in reward.terms if term.scorer.judge]
    assert reward.total(verdicts) == Verdict(pytest.approx(maximum), True)
    assert exact_alnum.judge(
        exact_alnum.examples(suffix, exact_alnum.Params())[0], exact_alnum.Params()
    ).correct


def refusal(scorers: list[ScorerConfig]) -> OmnifleetError:
    with pytest.raises(OmnifleetError) as caught:
        Registry().reward(scorers)
    return caught.value


def test_unknown_names_versions_and_parameters_are_refused() -> None:
    assert refusal([ScorerConfig(name="exact")]).reason is Reason.NOT_FOUND
    assert refusal([ScorerConfig(name="format", version="9")]).reason is Reason.NOT_FOUND
    typo = refusal([ScorerConfig(name="format", params={"think_tga": "x"})])
    assert typo.reason is Reason.INVALID_REQUEST and "think_tag" in typo.message
    assert "more than once" in refusal([CLEVR[0], CLEVR[0]]).message
    assert refusal([]).knob == "reward"


def test_functions_are_found_only_in_allowed_modules() -> None:
    assert refusal([ScorerConfig(name="os:getcwd")]).knob == "reward_service.modules"
    allowed = Registry(["textwrap"])
    assert allowed.find("textwrap:dedent").name == "textwrap:dedent"
    for name in ("textwrap:_munge", "textwrap:re", "textwrap:missing", "textwrap.re:compile"):
        with pytest.raises(OmnifleetError):
            allowed.find(name)
    with pytest.raises(OmnifleetError) as caught:
        Registry(["no_such_module_here"])
    assert caught.value.reason is Reason.INVALID_CONFIG
