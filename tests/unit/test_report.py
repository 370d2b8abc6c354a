"""The demo's report: claims follow from numbers, and fail when the numbers do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from omnifleet.cli import counted as counted_by
from omnifleet.cli.counted import keep_counters
from omnifleet.cli.demo_report import demo_checks, media_checks
from omnifleet.client.fleet import WorkerView
from omnifleet.config import load_recipe
from omnifleet.report.curves import draw_curves
from omnifleet.report.facts import Check, Fact, agreement, ledger_facts, run_checks, training_facts
from omnifleet.report.lives import Life, added_up, living, merged, read_lives, write_lives
from omnifleet.report.page import counted, gone_workers, paired_samples, write_page
from omnifleet.report.records import RunRecords, read_run
from omnifleet.types import WorkerState

RECIPE = load_recipe("cpu-tiny")
SAMPLES = RECIPE.trainer.prompts_per_step * RECIPE.trainer.generations_per_prompt
SUMMARY: dict[str, Any] = {
    "steps": 20,
    "heldout_start": 0.55,
    "heldout_end": 0.85,
    "controls": {"blank": 0.43, "shuffled": 0.45},
    "refits": 21,
    "refits_with_requests_in_flight": 3,
    "ledger": {"consumed": 20 * SAMPLES, "consumed_twice": 0},
}
CONTROL = {"heldout_start": 0.55, "heldout_end": 0.55, "steps": 4}
COUNTERS = {
    "media objects": 10.0,
    "media decodes": 10.0,
    "media segments_computed": 10.0,
    "media bytes_streamed": 0.0,
    "media shm_maps": 30.0,
    "worker-0 pictures_sent": 7.0,
    "worker-0 encoder_items": 7.0,
}


def failing(
    summary: dict[str, Any], counters: dict[str, float], control: dict[str, Any] = CONTROL
) -> list[str]:
    run = RunRecords("t", [{"step": 1, "tmpe": 1.01}], [], {**SUMMARY, **summary})
    return [c.claim for c in demo_checks(run, RECIPE, control, {**COUNTERS, **counters}) if not c.ok]


def test_a_good_run_fails_nothing() -> None:
    assert failing({}, {}) == []


@pytest.mark.parametrize(
    ("summary", "counters", "claim"),
    [
        ({"heldout_end": 0.74}, {}, "held-out reward rises"),
        ({"heldout_start": 0.66}, {}, "held-out reward rises"),
        ({"controls": {"blank": 0.51}}, {}, "the model looks"),
        ({"controls": {}}, {}, "the model looks"),
        ({"refits": 19}, {}, "weights went back"),
        ({"refits_with_requests_in_flight": 0}, {}, "weights went back"),
        ({"ledger": {"consumed": 20 * SAMPLES - 1, "consumed_twice": 0}}, {}, "every trained sample"),
        ({"ledger": {"consumed": 20 * SAMPLES, "consumed_twice": 1}}, {}, "every trained sample"),
        ({}, {"media decodes": 11.0}, "a picture is decoded"),
        ({}, {"media objects": 0.0}, "a picture is decoded"),
        ({}, {"media bytes_streamed": 1.0}, "its bytes move once"),
        ({}, {"worker-0 encoder_items": 8.0}, "it is encoded once"),
    ],
)
def test_each_claim_fails_with_its_number(
    summary: dict[str, Any], counters: dict[str, float], claim: str
) -> None:
    assert any(failed.startswith(claim) for failed in failing(summary, counters))


def test_a_control_that_moves_fails() -> None:
    assert failing({}, {}, {"heldout_start": 0.55, "heldout_end": 0.61, "steps": 4}) != []


def test_no_worker_proves_nothing() -> None:
    assert not media_checks({"media objects": 1.0})[-1].ok


def sample(step: int, prompt: str, reward: float) -> dict[str, Any]:
    text = {"prompt_id": prompt, "media": ["d"], "question": "how many?", "answer": "3"}
    return {"step": step, "reply": f"<answer>{reward}</answer>", "reward": reward, **text}


def test_samples_are_paired_by_prompt_improved_first() -> None:
    rows = [
        sample(0, "a", 0.2),
        sample(0, "b", 0.2),
        sample(9, "a", 0.2),
        sample(9, "b", 1.0),
        sample(9, "c", 1.0),
    ]
    pairs = paired_samples(rows, {})
    assert [(p["before_reward"], p["after_reward"]) for p in pairs] == [(0.2, 1.0), (0.2, 0.2)]


def test_page_and_curves_are_written_and_text_is_escaped(tmp_path: Path) -> None:
    metrics = [{"step": i, "reward": i / 10, "tmpe": 1.0, "heldout_reward": 0.5} for i in range(3)]
    torn = "\n".join([*map(json.dumps, [*metrics, {"step": 2, "reward": 0.9}]), '{"step": 3, "re'])
    (tmp_path / "metrics.jsonl").write_text(torn)
    (tmp_path / "samples.jsonl").write_text(
        "\n".join(map(json.dumps, [sample(0, "a", 0.2), sample(2, "a", 1.0)]))
    )
    (tmp_path / "summary.json").write_text(json.dumps(SUMMARY))
    run = read_run(tmp_path)
    assert run.series("reward") == ([0.0, 1.0, 2.0], [0.0, 0.1, 0.9]), "the last record of a step counts"
    curves = draw_curves(run, tmp_path / "curves.png")
    assert curves.read_bytes().startswith(b"\x89PNG")
    page = write_page(
        run,
        tmp_path / "r.html",
        curves=curves,
        subtitle="s",
        checks=[Check("1 < 2", True, "<b>")],
        ledger=LEDGER,
        pictures={"d": b"p"},
        lives=[Life("media", "a", 1.0, {"bytes_received": 2000.0, "puts": 3.0})],
    )
    text = page.read_text()
    assert "0.50 → 0.50" in text and "&lt;answer&gt;1.0&lt;/answer&gt;" in text and "<b>" not in text
    assert "2.0 kB" in text and "uploads" in text and "bytes_received" not in text
    assert "at step 2" in text and "are not shown" not in text


# ------------------------------------------------------------------ any run


LEDGER = {"attempts": 9, "consumed": 8, "consumed_twice": 0, "expired": 0, "lost": 0}


def test_every_run_is_asked_whether_a_reply_counted_twice_and_whether_the_engines_agreed() -> None:
    run = RunRecords("t", [{"step": 1, "tmpe": 1.01}, {"step": 2, "tmpe": 1.04}], [], {})
    assert [check.ok for check in run_checks(run, LEDGER)] == [True, True]
    apart = RunRecords("t", [*run.steps, {"step": 3, "tmpe": 1.05}], [], {})
    assert [check.ok for check in run_checks(apart, LEDGER)] == [False, True]
    for fault in ("consumed_twice", "lost"):
        assert [check.ok for check in run_checks(run, {**LEDGER, fault: 1})] == [True, False]
    assert run_checks(RunRecords("t", [], [], {}), {}) == [], "what nobody measured is not claimed"


def test_where_engine_and_trainer_differ_the_step_and_the_cause_are_told() -> None:
    key = "token_mult_prob_error_lag0"
    rows = [
        {"step": 1, "tmpe": 1.0, key: 1.0},
        {"step": 2, "tmpe": 41.0, key: 1.001},
        {"step": 3, "tmpe": 1.1},
    ]
    drifted = agreement(RunRecords("t", rows, [], {}), 1.02)
    assert not drifted.ok
    assert drifted.evidence == (
        "highest 41.00000, step 2 of 3; 2 above; of tokens of the trained version itself at most 1.00100: "
        "the policy moved between versions"
    )
    rows[1][key] = 1.5
    assert agreement(RunRecords("t", rows, [], {}), 1.02).evidence.endswith("at most 1.50000: numbers differ")
    assert agreement(RunRecords("t", rows[:1], [], {}), 1.02).evidence == "highest 1.00000, step 1 of 1"
    assert not agreement(RunRecords("t", [], [], {}), 1.02).ok


def test_the_ledger_is_told_in_words_and_zeros_only_where_they_matter() -> None:
    assert ledger_facts(LEDGER) == [
        Fact("9", "attempts at them"),
        Fact("8", "replies trained on"),
        Fact("0", "replies trained on twice"),
        Fact("0", "prompts lost"),
    ]


def test_facts_of_training_are_sums_over_its_steps() -> None:
    row = {"reward": 0.5, "step_s": 60.0, "wait_s": 15.0, "response_tokens": 1000.0, "groups": 4.0}
    steps = [{"step": 0, "refit_in_flight": 0.0}]
    steps += [{"step": i, **row, "zero_signal_groups": 1.0, "refit_in_flight": 2.0} for i in (1, 2)]
    told = [f"{fact.value} {fact.words}" for fact in training_facts(RunRecords("t", steps, [], {}))]
    assert told == [
        "2 steps",
        "2 min 00 s in them, 25% of it waiting for replies",
        "2,000 tokens of replies trained",
        "3 refits, 2 while replies were being written",
        "25% of groups had equal rewards and taught nothing",
    ]
    assert training_facts(RunRecords("t", steps[:1], [], {})) == []


def test_a_run_that_has_only_begun_shows_one_column_and_says_what_was_not_measured(tmp_path: Path) -> None:
    begun = RunRecords("t", [{"step": 0, "heldout_reward": 0.5}], [sample(0, "a", 0.2)], {})
    page = write_page(
        begun,
        tmp_path / "r.html",
        curves=draw_curves(begun, tmp_path / "c.png"),
        subtitle="",
        checks=[],
        ledger={},
        pictures={},
        lives=[],
    ).read_text()
    assert "held-out reward 0.50 before training" in page and "→" not in page
    assert page.count("<th>reward</th>") == 1 and "1 pictures are not shown" in page
    for absent in ("Can this be trusted?", "Ledger", "Counted by the services", "Training"):
        assert f"<h2>{absent}" not in page


# ------------------------------------------------------------------ processes that ended


WORKER = {"samples_finished": 4.0, "tokens_generated": 40.0, "refits": 2.0, "kv_usage": 0.5}
LIVES = [
    Life(
        "media", "m1", 1.0, {"puts": 300.0, "disk_bytes_used": 9.0, "map_rate": 0.9}, "was killed by SIGKILL"
    ),
    Life("worker-0", "a", 2.0, WORKER, "dead: silent for 12.1 s"),
    Life("worker-1", "b", 3.0, WORKER, "retired: drained"),
    Life("media", "m2", 4.0, {"puts": 27.0, "disk_bytes_used": 5.0, "map_rate": 0.1}),
    Life("worker-10", "c", 5.0, WORKER),
    Life("worker-2", "d", 6.0, WORKER),
]


def test_lives_of_a_service_are_added_up_and_workers_that_left_are_counted_and_say_how_they_ended() -> None:
    shown = {one.who: (one.note, {row.words: row.value for row in one.rows}) for one in counted(LIVES)}
    assert list(shown) == ["media", "worker-2", "worker-10", "all workers"]
    note, media = shown["media"]
    assert "2 processes" in note and "was killed by SIGKILL" in note
    assert media == {"uploads": "327", "on disk": "5 B"}, "levels are the last one's, quotients nobody's"
    note, workers = shown["all workers"]
    assert note == "4 processes" and workers == {
        "replies finished": "16",
        "tokens generated": "160",
        "refits": "8",
    }
    assert [(one.who, one.ended) for one in gone_workers(LIVES)] == [
        ("worker-0", "dead: silent for 12.1 s"),
        ("worker-1", "retired: drained"),
    ]
    assert [row.value for row in gone_workers(LIVES)[0].rows] == ["4", "0", "40", "2"]


def test_one_process_of_each_needs_no_note_and_no_sum() -> None:
    (one,) = counted([LIVES[3]])
    assert one.note == "" and {row.words for row in one.rows} == {
        "uploads",
        "on disk",
        "of reads by shared memory",
    }
    assert gone_workers(LIVES[3:]) == []
    assert [one.who for one in counted(LIVES[4:])] == ["worker-2", "worker-10"]


def test_what_only_grows_never_gets_less_and_an_end_stays(tmp_path: Path) -> None:
    known = [Life("worker-0", "a", 2.0, {"refits": 5.0, "kv_usage": 0.9}, "dead: silent")]
    seen = [Life("worker-0", "a", 0.0, {"refits": 4.0, "kv_usage": 0.1}), Life("worker-0", "b", 7.0)]
    lives = merged(known, seen)
    assert lives == [
        Life("worker-0", "a", 2.0, {"refits": 5.0, "kv_usage": 0.1}, "dead: silent"),
        Life("worker-0", "b", 7.0),
    ]
    write_lives(tmp_path, lives)
    assert read_lives(tmp_path) == lives
    assert added_up(LIVES[:1]) == LIVES[0].counters and living(LIVES)["media puts"] == 27.0
    assert not any(name.startswith("worker-0") for name in living(LIVES))


def test_a_look_keeps_who_ended_since_the_last_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    why = "was killed by SIGKILL (the kernel does so when memory runs out): last words"
    ends = [{"name": name, "pid": pid, "why": why} for name, pid in (("media", 7), ("worker-0", 8))]
    (tmp_path / "supervisor.json").write_text(json.dumps({"ends": ends}))
    before = [Life("media", "m1", 1.0, {"puts": 300.0}), Life("worker-0", "a", 2.0, {"refits": 1.0})]
    write_lives(tmp_path, [*before, Life("worker-9", "z", 2.5)])
    dead = WorkerView(
        "worker-0-a", "a", state=WorkerState.DEAD, note="silent", counters={"refits": 3.0}, pid=8
    )
    left = WorkerView("worker-1-b", "b", state=WorkerState.RETIRED, note="drained", counters={"a/b": 1.0})

    async def look(*_: object) -> tuple[list[Life], list[WorkerView]]:
        return [Life("media", "m2", 4.0, {"puts": 27.0})], [dead, left]

    monkeypatch.setattr(counted_by, "_look", look)
    (tmp_path / "summary.json").write_text(json.dumps({"counters": {"step": 5.0}, "instance": "t"}))
    lives = keep_counters(tmp_path)
    assert lives == read_lives(tmp_path)
    assert {(life.who, life.instance): (life.ended, dict(life.counters)) for life in lives} == {
        ("media", "m1"): ("was killed by SIGKILL", {"puts": 300.0}),
        ("media", "m2"): ("", {"puts": 27.0}),
        ("worker-0", "a"): ("dead: was killed by SIGKILL", {"refits": 3.0}),
        ("worker-1", "b"): ("retired: drained", {}),
        ("worker-9", "z"): ("ended", {}),
        ("trainer", "t"): ("", {"step": 5.0}),
    }, "worker-9 is nobody's any more; what the trainer counted is in its summary"
