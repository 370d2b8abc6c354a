"""The order of a step over a pure-torch policy: passes, rejections, baselines, normalisers, what is reported."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from omnifleet.config.objective import ObjectiveConfig
from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.policy.mismatch import Mismatch, MismatchPlots
from omnifleet_trainer.policy.passes import needs_prev_pass
from tests.unit.step_world import Bigrams, assign, batch_of, cut, sample
from tests.unit.test_objective_loss import OBJECTIVES


def on_policy(batch: StepBatch, policy: Bigrams) -> StepBatch:
    for one, values in zip(batch.samples, policy.logprobs(batch), strict=True):
        one.generation_logprobs = values.tolist()
    return batch


def gradient(batch: StepBatch, objective: ObjectiveConfig, **settings: Any) -> torch.Tensor:
    policy = Bigrams()
    policy.train(batch, objective, **settings)
    (found,) = policy.gradients
    return found


@pytest.mark.parametrize("name", sorted(OBJECTIVES))
def test_micro_batches_do_not_change_the_update(name: str) -> None:
    """Also where the update's normalisers need a pass of their own (weight normalisation)."""
    objective = ObjectiveConfig(**OBJECTIVES[name])
    batch = batch_of(3, 4, objective, policy=Bigrams())
    whole, pieces = gradient(batch, objective), gradient(batch, objective, tokens=8)
    assert len(cut(batch, tokens=8)) > 5
    assert whole.abs().max() > 0
    torch.testing.assert_close(pieces, whole, rtol=1e-6, atol=1e-9)


def test_grp_02_equal_rewards_move_nothing() -> None:
    objective = ObjectiveConfig()
    batch = StepBatch([sample(f"{i}", "g", 0.95, [i, i + 1, 3]) for i in range(8)], 1)
    assign(batch, objective)
    assert gradient(on_policy(batch, Bigrams()), objective).abs().max() == 0.0


def test_on_policy_ratios_weights_and_errors_are_one() -> None:
    objective = ObjectiveConfig()
    policy = Bigrams()
    batch = on_policy(batch_of(2, 4, objective), policy)
    metrics = policy.train(batch, objective)
    for name in ("probs_ratio", "token_mult_prob_error", "sampling_importance_ratio", "ess"):
        assert metrics[name] == pytest.approx(1.0, abs=1e-6), name
    assert metrics["logprob_gap_max"] < 1e-6
    assert metrics["clipped_high_share"] == metrics["is_oob_ratio"] == metrics["masked_token_share"] == 0.0
    assert metrics["loss"] == pytest.approx(
        -np.mean([s.advantage for s in batch.samples for _ in s.token_ids])
    )


def far_off() -> tuple[Bigrams, StepBatch]:
    """A group of rewards 1, 0, 0 whose third reply the engine gave other logprobs than the trainer computes."""
    policy = Bigrams()
    batch = StepBatch([sample(str(i), "g", float(i == 0), [4, 5, i]) for i in range(3)], 1)
    on_policy(batch, policy)
    batch.samples[2].generation_logprobs = [x - 3 for x in batch.samples[2].generation_logprobs]
    return policy, batch


@pytest.mark.parametrize(
    "rule",
    [
        {"sequence_error_threshold": 2.0},
        {"rejection": [{"rule": "sequence", "max": 2.0}]},
        {"rejection": [{"rule": "geometric", "min": 0.9, "max": 1.1}]},
        {"rejection": [{"rule": "k3", "max": 0.01}]},
        {"rejection": [{"rule": "veto", "min": 0.1, "max": 10.0}]},
    ],
)
def test_trap_a_rejected_sample_leaves_the_baseline_and_the_divisor(rule: dict[str, Any]) -> None:
    policy, batch = far_off()
    objective = ObjectiveConfig.model_validate({"std": "none", **rule})
    assign(batch, objective)
    assert [s.advantage for s in batch.samples] == pytest.approx([1.0, -0.5, -0.5])
    metrics = policy.train(batch, objective)
    assert (metrics["advantages/max"], metrics["advantages/min"]) == (1.0, -1.0)
    assert metrics["num_masked_seqs_by_logprob_error"] == 1.0
    assert metrics["masked_correct_pct"] == 0.0
    assert metrics["max_seq_mult_prob_error"] == pytest.approx(math.exp(3), rel=1e-5)
    assert metrics["max_seq_mult_prob_error_after_mask"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["global_valid_seqs"] == 2.0 and metrics["global_valid_toks"] == 6.0
    assert metrics["masked_sample_share"] == pytest.approx(1 / 3)
    _, without = far_off()
    without.samples.pop()
    assign(without, objective)
    torch.testing.assert_close(policy.gradients[0], gradient(without, objective), rtol=1e-6, atol=1e-9)


def test_a_step_whose_samples_are_all_rejected_moves_nothing() -> None:
    policy, batch = far_off()
    for one in batch.samples:
        one.generation_logprobs = [-9.0] * 3
    objective = ObjectiveConfig(sequence_error_threshold=1.5)
    assign(batch, objective)
    metrics = policy.train(batch, objective)
    assert metrics["skipped_updates"] == 1.0 and not policy.gradients


def test_kl_in_the_reward_takes_from_the_sample_that_drifted() -> None:
    policy = Bigrams()
    with torch.no_grad():
        policy.table[4, 5] += 2.0  # only the first reply goes 4 -> 5
    objective = ObjectiveConfig(
        baseline="group_mean", std="none", kl_coefficient=0.1, kl_in="reward", kl_type="k1"
    )
    batch = StepBatch([sample("a", "g", 1.0, [4, 5]), sample("b", "g", 1.0, [6, 7])], 1)
    assign(batch, objective)
    on_policy(batch, policy)
    metrics = policy.train(batch, objective)
    (micro,) = cut(batch)
    drift = (policy.forward(micro) - policy.reference_logprobs([micro])[0]).sum(-1).tolist()
    kl = dict(zip(micro.rows, drift, strict=True))
    assert kl[0] > 0.5 and kl[1] == pytest.approx(0.0, abs=1e-9)
    assert metrics["advantages/max"] == pytest.approx(0.1 * kl[0] / 2, rel=1e-5)
    assert metrics["kl_penalty"] == 0.0


def test_the_prev_pass_is_left_out_only_where_nobody_asks_for_it() -> None:
    assert not needs_prev_pass(ObjectiveConfig(), 1)
    assert needs_prev_pass(ObjectiveConfig(), 2)
    for settings in (
        {"sequence_error_threshold": 2.0},
        {"rejection": [{"rule": "k2", "max": 1.0}]},
        {"weight_normalisation": True},
        {"kl_coefficient": 0.1, "kl_in": "reward"},
    ):
        assert needs_prev_pass(ObjectiveConfig.model_validate(settings), 1)
    objective = ObjectiveConfig(kl_coefficient=0.1)
    batch = batch_of(2, 4, objective, policy=Bigrams())
    plain = gradient(batch, objective)
    asked = gradient(batch, objective.model_copy(update={"sequence_error_threshold": 1e6}))
    torch.testing.assert_close(asked, plain, rtol=1e-6, atol=1e-9)


def test_later_updates_of_a_step_are_clipped_against_its_first_weights() -> None:
    policy = Bigrams(lr=50.0)
    objective = ObjectiveConfig()
    batch = on_policy(batch_of(4, 2, objective), policy)
    metrics = policy.train(batch, objective, updates=4)
    assert len(policy.gradients) == 4
    assert metrics["probs_ratio_max"] > 1.2
    assert metrics["clipped_high_share"] + metrics["clipped_low_share"] > 0


# ------------------------------------------------------------------ messages, environments, filters


def test_faulty_messages_get_their_own_advantage() -> None:
    objective = ObjectiveConfig(std="none", advantage_clip=1.5)
    batch = StepBatch(
        [sample("a", "g", 1.0, [4, 5, 6], penalties=((1, 3, -2.0),)), sample("b", "g", 0.0, [7, 8])], 1
    )
    assign(batch, objective)
    (micro,) = cut(batch, clip=objective.advantage_clip)
    row = micro.rows.index(0)
    assert micro.advantages[row, 2:5].tolist() == [1.0, -1.5, -1.5]  # overwritten, then clamped


def test_trap_no_row_holds_what_an_environment_said_last() -> None:
    whole = sample("a", "g", 1.0, [4, 9, 9, 5, 9, 9], mask=[1, 0, 0, 1, 0, 0], truncated=False)
    trimmed = whole.trimmed()
    assert trimmed.token_ids == [4, 9, 9, 5] and trimmed.mask == [1, 0, 0, 1]
    assert len(trimmed.generation_logprobs) == len(trimmed.lag) == 4
    assert not trimmed.truncated
    (micro,) = cut(StepBatch([trimmed], 1))
    assert micro.input_ids.shape == (1, 6) and micro.token_mask.sum() == 2
    assert sample("b", "g", 0.0, [9], mask=[0]).trimmed().token_ids == []


def test_a_sampler_that_filtered_is_compared_on_its_own_support() -> None:
    policy = Bigrams()
    filtered = sample("a", "g", 1.0, [4, 5], kept_ids=[[4, 7], []])
    micro = cut(StepBatch([filtered], 1))[0]
    first, second = policy.forward(micro)[0].tolist()
    row, after = policy.table.detach()[2], policy.table.detach()[4]
    assert first == pytest.approx(float(row[4] - torch.logsumexp(row[[4, 7]], 0)))
    assert second == pytest.approx(float(torch.log_softmax(after, 0)[5]))


# ------------------------------------------------------------------ the worst sample


def test_the_worst_sample_of_a_bad_step_is_kept(tmp_path: Path) -> None:
    policy, batch = far_off()
    assign(batch, ObjectiveConfig())
    metrics = policy.train(batch, ObjectiveConfig(), on_mismatch=MismatchPlots(tmp_path / "mismatch"))
    assert metrics["token_mult_prob_error"] > 1.05
    assert (tmp_path / "mismatch" / "step-1.png").read_bytes().startswith(b"\x89PNG")
    body = json.loads((tmp_path / "mismatch" / "step-1.json").read_text())
    assert body["trajectory"] == "2" and body["error"] == pytest.approx(math.exp(3), rel=1e-5)
    ratios = np.array(body["policy"]) / np.array(body["generation"])
    assert ratios == pytest.approx([math.exp(3)] * 3, rel=1e-5)


def test_a_good_step_shows_nothing_and_old_plots_go(tmp_path: Path) -> None:
    policy, told = Bigrams(), []
    batch = on_policy(batch_of(2, 2, ObjectiveConfig()), policy)
    policy.train(batch, ObjectiveConfig(), on_mismatch=lambda *what: told.append(what))
    assert not told
    plots = MismatchPlots(tmp_path, kept=2)
    values = np.array([0.5, 0.25])
    for step in (8, 9, 10):
        plots(step, batch.samples[0], Mismatch(0, 1.5, values, values))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "step-10.json",
        "step-10.png",
        "step-9.json",
        "step-9.png",
    ]
