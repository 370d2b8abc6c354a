"""Questions about sounds, end to end: avqa's rows, an environment, an engine and a policy, each service a process."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from omnifleet_trainer.tiny.hybrid import write_hybrid
from tests.sounds import tone, wav
from tests.support_run import CliRun

QUESTION = "What do you hear?\nChoices:\nA. a flute\nB. a drum"


def write_avqa(folder: Path, *, rows: int) -> None:
    """As many sounds of about a second, in both splits."""
    (folder / "data").mkdir(parents=True)
    for split in ("train", "validation"):
        sounds = [wav(tone(14_400 + 640 * i, 200 + 100 * i)) for i in range(rows)]
        table = [{"audio": {"bytes": s, "path": ""}, "question": QUESTION, "answer": "A"} for s in sounds]
        pq.write_table(pa.Table.from_pylist(table), folder / "data" / f"{split}-0.parquet")


@pytest.mark.heavy
@pytest.mark.soak
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("engine", "backend"), [("fake", "automodel"), ("vllm", "automodel"), ("vllm", "megatron")]
)
def test_sounds_train_two_steps(tmp_path: Path, engine: str, backend: str) -> None:
    """The fake engine has no probabilities that the trainer's could be compared with."""
    write_hybrid(tmp_path / "model", sound=True)
    write_avqa(tmp_path / "sets", rows=4)
    settings = [
        f"model.path={tmp_path / 'model'}",
        f"trainer.backend={backend}",
        "model.freeze=['vision_model.*', 'sound_encoder.*', 'sound_projection.*']",
        *(f"data.{name}.dataset=avqa" for name in ("train", "heldout")),
        *(f"data.{name}.path={tmp_path / 'sets'}" for name in ("train", "heldout")),
        "data.train.size=4",
        "data.heldout.split=validation",
        "data.max_prompt_tokens=700",
        "sampling.bad_words=[]",
        "sampling.max_tokens=24",
        "evaluation.size=2",
        "rollout.engine.max_model_len=768",
        "rollout.engine.sounds_per_prompt=1",
    ]
    run = CliRun(tmp_path, settings, engine=engine, recipe="twins/clevr-automodel")
    summary, steps = run.to_the_end(800)
    ledger = summary["ledger"]
    assert (ledger["consumed"], ledger["consumed_twice"], ledger["lost"]) == (2 * 8, 0, 0)
    for row in steps[1:]:  # of three passes; what was heard once is known from then on
        assert row["media_references"] == 3 * 8 and row["media_encoded"] <= 2
    assert sum(row["media_encoded"] for row in steps[1:]) <= 4
    print(f"\n{engine}, {backend}: TMPE {summary['tmpe_max']}")
    assert engine == "fake" or summary["tmpe_max"] < 1.05, "bfloat16 on both sides"
