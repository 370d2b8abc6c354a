"""The loss against hand-computed values and a numpy implementation of its own; field cases by id."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError
from torch import Tensor

from omnifleet.config.recipe import ObjectiveConfig
from omnifleet_trainer.objectives.corrections.errors import sequence_errors, within_error
from omnifleet_trainer.objectives.corrections.weights import importance_weights
from omnifleet_trainer.objectives.kl import kl_estimate, kl_penalty
from omnifleet_trainer.objectives.loss import Loss, policy_loss
from omnifleet_trainer.objectives.masks import keep_whole, shifted
from omnifleet_trainer.objectives.reductions import reduce
from omnifleet_trainer.objectives.tensors import Normalisers, masked_mean

PLAIN = {"importance_correction": False}


def tensor(values: Any) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def loss_of(
    current: Any,
    *,
    prev: Any = None,
    generation: Any = None,
    advantages: Any = 1.0,
    mask: Any = None,
    samples: Any = None,
    reference: Any = None,
    normalisers: Normalisers | None = None,
    **objective: Any,
) -> Loss:
    now = tensor(current)
    p = now.clone() if prev is None else tensor(prev)
    token_mask = torch.ones_like(now) if mask is None else tensor(mask)
    sample_mask = torch.ones(len(now), dtype=torch.float64) if samples is None else tensor(samples)
    both = token_mask * sample_mask[:, None]
    counted = Normalisers(float(both.sum()), float((both.sum(-1) > 0).sum()))
    return policy_loss(
        current=now,
        prev=p,
        generation=p.clone() if generation is None else tensor(generation),
        advantages=tensor(advantages).expand_as(now) if np.ndim(advantages) == 0 else tensor(advantages),
        token_mask=token_mask,
        sample_mask=sample_mask,
        normalisers=normalisers or counted,
        objective=ObjectiveConfig(**objective),
        reference=None if reference is None else tensor(reference),
    )


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected"), [(1.5, 1, -1.2), (1.5, -1, 1.5), (0.5, 1, -0.5), (0.5, -1, 0.8)]
)
def test_grp_17_clipping_bites_on_the_right_side(ratio: float, advantage: float, expected: float) -> None:
    loss = loss_of([[math.log(ratio)]], prev=[[0.0]], advantages=advantage, **PLAIN)
    assert loss.value.item() == pytest.approx(expected, rel=1e-6)


def test_asymmetric_and_dual_clip() -> None:
    high = loss_of([[math.log(1.5)]], prev=[[0.0]], clip_high=0.28, **PLAIN)
    assert high.value.item() == pytest.approx(-1.28, rel=1e-6)
    bounded = loss_of([[math.log(9.0)]], prev=[[0.0]], advantages=-1.0, dual_clip=3.0, **PLAIN)
    assert bounded.value.item() == pytest.approx(3.0, rel=1e-6)
    untouched = loss_of([[math.log(0.1)]], prev=[[0.0]], advantages=1.0, dual_clip=3.0, **PLAIN)
    assert untouched.value.item() == pytest.approx(-0.1, rel=1e-6)


@pytest.mark.parametrize(
    ("logp", "ref", "k1", "k2", "k3"), [(-1, -2, 1, 0.5, 0.3678794), (-2, -1, -1, 0.5, 0.7182818)]
)
def test_grp_12_kl_estimators_have_the_right_sign(
    logp: float, ref: float, k1: float, k2: float, k3: float
) -> None:
    gap = tensor([ref - logp])
    assert [kl_estimate(gap, kind).item() for kind in ("k1", "k2", "k3")] == pytest.approx([k1, k2, k3])
    with_kl = loss_of([[logp]], reference=[[ref]], advantages=0.0, kl_coefficient=0.1, **PLAIN)
    assert with_kl.value.item() == pytest.approx(0.1 * k3, rel=1e-6)
    assert with_kl.kl.item() == pytest.approx(k3, rel=1e-6)


def test_kl_clamps_and_their_gradient() -> None:
    objective = ObjectiveConfig(kl_coefficient=0.1, kl_input_clamp=2.0, kl_output_clamp=1.0)
    current = tensor([[-5.0, -1.0]]).requires_grad_()
    penalty = kl_penalty(current, tensor([[-1.0, -2.0]]), current.detach(), objective)
    assert penalty[0, 0].item() == 1.0  # e^2 - 3 = 4.39, clamped to 1
    assert penalty[0, 1].item() == pytest.approx(math.exp(-1))
    penalty.sum().backward()
    # The clamped entry carries none; the other: k3' + k3 (weight's score term) = (1 - e^-1) + e^-1 = 1.
    assert current.grad is not None and current.grad.tolist()[0] == pytest.approx([0.0, 1.0])


def test_kl_without_reference_is_refused() -> None:
    with pytest.raises(ValueError, match="reference"):
        loss_of([[0.0]], kl_coefficient=0.1)


def test_grp_08_token_mean_does_not_depend_on_the_split() -> None:
    losses = [[3.0], [1.0, 1.0, 1.0], [0.5] * 4]
    whole = Normalisers(8.0, 3.0)
    total = sum(reduce(tensor([part]), torch.ones(1, len(part)).double(), whole, "token") for part in losses)
    assert float(total) == pytest.approx(1.0)


def test_grp_10_masked_samples_leave_the_denominator() -> None:
    values, mask = torch.ones(2, 6).double(), tensor([[1, 1, 1, 1, 0, 0], [1] * 6])
    kept = mask * keep_whole(torch.tensor([False, True]), overlong_filtering=True)[:, None]
    assert kept.sum() == 4
    assert reduce(values, kept, Normalisers(4.0, 1.0), "token").item() == pytest.approx(1.0)
    assert keep_whole(torch.tensor([False, True]), overlong_filtering=False).tolist() == [1.0, 1.0]


def test_grp_14_the_first_answer_token_trains() -> None:
    assert shifted(tensor([[0, 0, 0, 1, 1]])).tolist() == [[0, 0, 1, 1]]


def test_grp_18_each_reduction_is_what_its_name_says() -> None:
    values, mask = tensor([[1, 1, 0, 0], [2, 2, 2, 2]]), tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
    whole = Normalisers(6.0, 2.0)
    assert reduce(values, mask, whole, "sequence").item() == pytest.approx(1.5)
    assert reduce(values, mask, whole, "token").item() == pytest.approx(1.6666667)
    assert reduce(values, mask, whole, "constant", 8).item() == pytest.approx(0.625)
    with pytest.raises(ValidationError, match="reduction_tokens"):
        ObjectiveConfig(reduction="constant")


def test_tok_06_environment_tokens_do_not_count_in_the_kl() -> None:
    logp, gap = tensor([[-1.0, -1.0, -1.0, -1.0]]), tensor([[0.1, 0.2, -5.0, -5.0]])
    mask = tensor([[1, 1, 0, 0]])
    objective = ObjectiveConfig(kl_type="k1", kl_coefficient=1.0)
    penalty = kl_penalty(logp, logp - gap, logp, objective)
    assert masked_mean(penalty, mask).item() == pytest.approx(0.15)
    assert mask.sum() == 2


def test_importance_truncations() -> None:
    gap = [[math.log(0.5), math.log(4.0), 0.0]]
    ones = torch.ones(1, 3).double()

    def weights(**objective: Any) -> tuple[list[float], list[float]]:
        found = importance_weights(
            tensor(gap), torch.zeros(1, 3).double(), ones, ObjectiveConfig(**objective)
        )
        return found.values[0].tolist(), (found.low | found.high)[0].tolist()

    assert weights() == (pytest.approx([0.5, 4.0, 1.0]), [0, 0, 0])
    bounds = {"truncation_min": 0.8, "truncation_max": 2.0}
    assert weights(truncation="tis", **bounds) == (pytest.approx([0.8, 2.0, 1.0]), [1, 1, 0])
    assert weights(truncation="icepop", **bounds) == (pytest.approx([0.0, 0.0, 1.0]), [1, 1, 0])
    # exp(mean gap) = 2^(1/3) = 1.26
    assert weights(truncation="seq-mask-tis", **bounds) == (pytest.approx([0.5, 4.0, 1.0]), [0, 0, 0])
    narrow = {"truncation_min": 0.999, "truncation_max": 1.002}
    assert weights(truncation="seq-mask-tis", **narrow) == ([0.0, 0.0, 0.0], [1, 1, 1])
    sequence = weights(ratio="sequence", reduction="sequence")
    assert sequence[0] == pytest.approx([2.0, 2.0, 2.0])


def test_weights_that_overflow_become_zero() -> None:
    weights = importance_weights(
        tensor([[900.0, 0.0]]), torch.zeros(1, 2).double(), torch.ones(1, 2).double(), ObjectiveConfig()
    )
    assert weights.values.tolist() == [[0.0, 1.0]]


def test_garbage_in_masked_positions_never_reaches_loss_or_gradient() -> None:
    current = tensor([[-1.0, -800.0]]).requires_grad_()
    loss = policy_loss(
        current=current,
        prev=tensor([[-1.1, 0.0]]),
        generation=tensor([[-1.2, 900.0]]),
        advantages=torch.ones(1, 2).double(),
        token_mask=tensor([[1, 0]]),
        sample_mask=torch.ones(1).double(),
        normalisers=Normalisers(1.0, 1.0),
        objective=ObjectiveConfig(),
    )
    loss.value.backward()  # type: ignore[no-untyped-call]
    assert loss.value.item() == pytest.approx(-math.exp(0.1) * math.exp(0.1))
    assert current.grad is not None and current.grad[0, 1].item() == 0.0


def test_sequence_error_mask() -> None:
    errors = sequence_errors(
        tensor([[-1.0, -2.0], [-1.0, -1.0]]), tensor([[-1.0, -2.0], [-3.0, -1.0]]), torch.ones(2, 2)
    )
    assert errors.tolist() == pytest.approx([1.0, (math.exp(2) + 1) / 2])
    assert within_error(errors, 2.0).tolist() == [1.0, 0.0]
    assert within_error(errors, None).tolist() == [1.0, 1.0]


# ------------------------------------------------------------------ an implementation of its own, and properties


def numpy_loss(case: dict[str, Any]) -> float:
    """ClippedPGLoss with loops and float64, written from the formulas and sharing no code with the product."""
    c: ObjectiveConfig = case["objective"]
    n_tokens = n_seqs = 0
    per_sequence = []
    for b in range(len(case["current"])):
        kept = [t for t in range(len(case["mask"][b])) if case["mask"][b][t] and case["samples"][b]]
        if not kept:
            continue
        n_seqs, n_tokens = n_seqs + 1, n_tokens + len(kept)
        log_r = {t: case["current"][b][t] - case["prev"][b][t] for t in kept}
        gap = {t: case["prev"][b][t] - case["generation"][b][t] for t in kept}
        mean_r, sum_gap = sum(log_r.values()) / len(kept), sum(gap.values())
        total = 0.0
        for t in kept:
            a = case["advantages"][b]
            r = math.exp(mean_r if c.ratio == "sequence" else log_r[t])
            value = max(-a * r, -a * min(max(r, 1 - c.clip_low), 1 + c.clip_high))
            if c.dual_clip is not None and a < 0:
                value = min(value, -a * c.dual_clip)
            w = math.exp(sum_gap if c.ratio == "sequence" else gap[t])
            if c.truncation == "tis":
                w = min(max(w, c.truncation_min), c.truncation_max)
            elif c.truncation == "icepop" and not c.truncation_min <= w <= c.truncation_max:
                w = 0.0
            if c.importance_correction:
                value *= w
            if c.kl_coefficient:
                x = case["reference"][b][t] - case["current"][b][t]
                value += c.kl_coefficient * {"k1": -x, "k2": x * x / 2, "k3": math.exp(x) - 1 - x}[c.kl_type]
            total += value
        per_sequence.append((total, len(kept)))
    if c.reduction == "token":
        return sum(total for total, _ in per_sequence) / (n_tokens + 1e-8)
    return sum(total / count for total, count in per_sequence) / (n_seqs + 1e-8)


OBJECTIVES = st.sampled_from(
    [
        ObjectiveConfig(),
        ObjectiveConfig(importance_correction=False, clip_high=0.28),
        ObjectiveConfig(dual_clip=3.0, truncation="tis", truncation_max=1.1),
        ObjectiveConfig(truncation="icepop", truncation_min=0.9, truncation_max=1.1),
        ObjectiveConfig(ratio="sequence", reduction="sequence"),
        ObjectiveConfig(reduction="sequence", kl_coefficient=0.3, kl_type="k1"),
        ObjectiveConfig(kl_coefficient=0.3, kl_type="k2"),
        ObjectiveConfig(kl_coefficient=0.3, kl_type="k3"),
    ]
)


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    rows, width = draw(st.integers(1, 5)), draw(st.integers(1, 6))
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    shape = (rows, width)
    prev = -random.exponential(1.0, shape)
    return {
        "objective": draw(OBJECTIVES),
        "current": prev + random.normal(0, 0.3, shape),
        "prev": prev,
        "generation": prev + random.normal(0, 0.1, shape),
        "reference": prev + random.normal(0, 0.2, shape),
        "advantages": random.normal(0, 1, rows),
        "mask": random.integers(0, 2, shape),
        "samples": random.integers(0, 2, rows),
    }


def total(case: dict[str, Any], cuts: list[list[int]] | None = None) -> float:
    """The product's loss, summed over micro-batches of the given rows."""
    both = case["mask"] * case["samples"][:, None]
    whole = Normalisers(float(both.sum()), float((both.sum(-1) > 0).sum()))
    value = 0.0
    for rows in cuts or [list(range(len(case["current"])))]:
        value += policy_loss(
            **{name: tensor(case[name][rows]) for name in ("current", "prev", "generation", "reference")},
            advantages=tensor(case["advantages"][rows])[:, None].expand(-1, case["mask"].shape[1]),
            token_mask=tensor(case["mask"][rows]),
            sample_mask=tensor(case["samples"][rows]),
            normalisers=whole,
            objective=case["objective"],
        ).value.item()
    return value


@settings(deadline=None)
@given(cases())
def test_agrees_with_the_numpy_implementation(case: dict[str, Any]) -> None:
    assert total(case) == pytest.approx(numpy_loss(case), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(cases(), st.randoms(use_true_random=False))
def test_order_and_cut_of_rows_do_not_matter(case: dict[str, Any], random: Any) -> None:
    rows = list(range(len(case["current"])))
    random.shuffle(rows)
    cut = random.randint(0, len(rows))
    cuts = [part for part in (rows[:cut], rows[cut:]) if part]
    assert total(case, cuts) == pytest.approx(total(case), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(cases(), st.integers(1, 4), st.floats(-50, 50))
def test_padding_does_not_matter(case: dict[str, Any], columns: int, garbage: float) -> None:
    padded = dict(case)
    for name in ("current", "prev", "generation", "reference"):
        padded[name] = np.pad(case[name], ((0, 0), (0, columns)), constant_values=garbage)
    padded["mask"] = np.pad(case["mask"], ((0, 0), (0, columns)))
    assert total(padded) == pytest.approx(total(case), rel=1e-9, abs=1e-9)


@settings(deadline=None)
@given(cases())
def test_masked_rows_do_not_matter(case: dict[str, Any]) -> None:
    kept = np.flatnonzero(case["samples"])
    if not len(kept):
        assert total(case) == 0.0
        return
    alone = {name: value if name == "objective" else value[kept] for name, value in case.items()}
    assert total(alone) == pytest.approx(total(case), rel=1e-9, abs=1e-9)
