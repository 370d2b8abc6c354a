"""Metrics of a step's samples and time, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from omnifleet_trainer.batch.samples import StepBatch
from omnifleet_trainer.loop.metrics import sample_metrics, time_metrics
from omnifleet_trainer.objectives.metrics import gap_metrics, mean_of_updates, sequence_error_metrics
from tests.unit.step_world import sample


def test_samples_by_hand() -> None:
    batch = StepBatch(
        [
            sample("a0", "a", 1.0, [1, 2], lag=[1, 0], advantage=1.5),
            sample("a1", "a", 0.0, [1, 2, 3, 4], lag=[0, 0, 0, 0], advantage=-0.5),
            sample("b0", "b", 0.0, [1], lag=[2], truncated=True),
            sample("b1", "b", 0.0, [1], lag=[0]),
            sample("c0", "c", 1.0, [1, 2], lag=[0, 0]),
        ],
        1,
    )
    metrics = sample_metrics(batch, [])
    expected = {
        "reward": 0.4,
        "advantages/mean": 0.2,
        "advantages/max": 1.5,
        "advantages/min": -0.5,
        "zero_signal_groups": 2.0,
        "baseline_reward/pct_0": 1 / 3,
        "baseline_reward/pct_1": 1 / 3,
        "baseline_reward/pct_mixed": 1 / 3,
        "truncation_rate": 0.2,
        "natural_termination_rate": 0.8,
        "lag/0": 0.8,
        "lag/1": 0.1,
        "lag/2": 0.1,
        "lag_mean": 0.3,
        "lag_max": 2.0,
        "avg_trajectory_age": 3 / 5,
        "mixed_version_share": 0.2,
        "mean_prompt_length": 2.0,
        "total_num_tokens": 20.0,
        "response_tokens": 10.0,
        "response_tokens_p50": 2.0,
        "response_tokens_max": 4.0,
    }
    assert {name: metrics[name] for name in expected} == pytest.approx(expected)


def test_time_by_hand() -> None:
    step = {
        "step_s": 10.0,
        "train_s": 6.0,
        "wait_s": 2.0,
        "prepare_s": 0.5,
        "refit_s": 1.5,
        "groups_ready": 3.0,
    }
    assert time_metrics(step) == {
        "idle/buffer_starvation_s": 2.0,
        "idle/prepare_s": 0.5,
        "idle/refit_bubble_s": 1.5,
        "efficiency_pct": 60.0,
        "buffer_size": 3.0,
    }
    assert time_metrics({}) == {}


def test_gaps_and_sequence_errors_by_hand() -> None:
    gaps = np.arange(101, dtype=np.float32) / 100
    assert gap_metrics(gaps) == pytest.approx(
        {"logprob_gap_p50": 0.5, "logprob_gap_p99": 0.99, "logprob_gap_max": 1.0}, rel=1e-5
    )
    assert gap_metrics(np.zeros(0, np.float32)) == {}
    assert sequence_error_metrics([1.0, 1.2, 4.0], [1.0, 1.2], [1.0, 0.0]) == pytest.approx(
        {
            "num_masked_seqs_by_logprob_error": 2.0,
            "max_seq_mult_prob_error": 4.0,
            "mean_seq_mult_prob_error": 6.2 / 3,
            "min_seq_mult_prob_error": 1.0,
            "max_seq_mult_prob_error_after_mask": 1.2,
            "mean_seq_mult_prob_error_after_mask": 1.1,
            "min_seq_mult_prob_error_after_mask": 1.0,
            "masked_correct_pct": 0.5,
        }
    )


def test_a_skipped_update_does_not_dilute_the_step() -> None:
    updates = [{"token_mult_prob_error": 1.2, "grad_norm": 1.0}, {"grad_norm": 0.0}]
    assert mean_of_updates(updates) == {"token_mult_prob_error": 1.2, "grad_norm": 0.5}
