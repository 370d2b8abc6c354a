"""A picture that vLLM lost on the way is sent again, never dropped and never another's; raw logprobs; bans. Real engine."""

import asyncio
import json
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

from omnifleet.auth import Scope
from omnifleet.client.media import MediaClient
from omnifleet.processor import image_token_id
from omnifleet.service import read_records
from omnifleet.types import MediaRef
from tests.integration.live_worker import ENGINE, TOLERANCE, Clients, Live, Scorer, make_checkpoint

pytestmark = [pytest.mark.heavy, pytest.mark.timeout(400)]


@dataclass
class Answers:
    """What the child printed, by what it asked; the checkpoint and its weights."""

    model: Path
    weights: dict[str, Any]
    pictures: list[Any]
    by_name: dict[str, dict[str, Any]]

    def __getitem__(self, what: str) -> dict[str, Any]:
        return self.by_name[what]

    def counted(self, what: str, name: str) -> float:
        return float(self[what]["counters"][name])


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Answers]:
    folder = tmp_path_factory.mktemp("misses")
    model = folder / "model"
    live = Live(folder / "run", model, make_checkpoint(model, tied=False))
    live.run_dir.mkdir()
    (live.run_dir / "recipe.yaml").write_text(yaml.safe_dump({}))
    try:
        media = live.start("omnifleet_media", name="media")
        refs, tensors = asyncio.run(_pictures(live))
        done = subprocess.run(
            [
                *(sys.executable, "-m", "tests.integration.engine_child", str(model), media),
                *(live.secret(Scope.SERVICE), "image", str(image_token_id(model))),
                *(ref.digest for ref in refs),
                json.dumps(ENGINE),
            ],
            capture_output=True,
            text=True,
            timeout=300,
            cwd=Path(__file__).resolve().parents[2],
        )
        assert done.returncode == 0, done.stderr[-4000:]
        lines = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
        yield Answers(model, live.weights, tensors, {line["what"]: line for line in lines})
    finally:
        live.close()


async def _pictures(live: Live) -> tuple[list[MediaRef], list[Any]]:
    address = read_records(live.run_dir)["media"].grpc
    async with MediaClient.open(address, live.secret(Scope.SERVICE)) as media:
        on = Clients(live, None, media, None, None, None)  # type: ignore[arg-type]
        refs = [await on.picture(colour, (84, 56)) for colour in ("red", "navy")]
        return refs, [{n: np.array(t) for n, t in (await on.tensors(ref)).items()} for ref in refs]


def test_a_picture_that_the_engine_lost_is_sent_again(answers: Answers) -> None:
    """Sign 2: `finish_reason=error` without a token. One retry with data, and the reply is what it was."""
    assert answers.counted("again", "pictures_sent") == 1 and answers.counted("again", "media_resent") == 0
    assert answers.counted("after the engine forgot", "media_resent") == 1
    assert answers.counted("after the engine forgot", "pictures_sent") == 2
    for what in ("again", "after the engine forgot", "once more", "after both forgot"):
        assert answers[what]["tokens"] == answers["first"]["tokens"], what
        assert np.abs(np.array(answers[what]["logprobs"]) - answers["first"]["logprobs"]).max() < TOLERANCE, (
            what
        )


def test_a_reset_of_both_sides_is_no_miss(answers: Answers) -> None:
    """Sign 1 cannot come: where the front end does not know a picture, it gets the pixels."""
    assert answers.counted("after both forgot", "media_resent") == answers.counted(
        "once more", "media_resent"
    )
    assert (
        answers.counted("after both forgot", "pictures_sent")
        == answers.counted("once more", "pictures_sent") + 1
    )


def test_no_reply_is_of_another_picture(answers: Answers) -> None:
    scorer = Scorer(answers.model, answers.model.parent)
    scorer.load(answers.weights)
    for what, tensors in (
        ("first", answers.pictures[0]),
        ("after the engine forgot", answers.pictures[0]),
        ("another picture", answers.pictures[1]),
    ):
        expected = scorer.logprobs(answers[what]["prompt"], answers[what]["tokens"], [tensors])
        assert np.abs(np.array(expected) - answers[what]["logprobs"]).max() < TOLERANCE, what


def test_LPR_01_raw_logprobs_are_before_the_temperature(answers: Answers) -> None:
    """Sampled at 0.6; the raw value of a token is that of temperature 1, and the trainer's side is told the mode."""
    scorer = Scorer(answers.model, answers.model.parent)
    scorer.load(answers.weights)
    raw = answers["raw"]
    at_1 = scorer.logprobs(raw["prompt"], raw["tokens"])
    at_06 = scorer.logprobs(raw["prompt"], raw["tokens"], temperature=0.6)
    assert np.abs(np.array(at_1) - raw["logprobs"]).max() < TOLERANCE
    assert np.abs(np.array(at_06) - raw["logprobs"]).max() > 10 * TOLERANCE


def test_PLC_03_a_banned_placeholder_is_never_written(answers: Answers) -> None:
    """Of the two tokens that were left, one is a placeholder and banned by the setting."""
    assert answers["banned"]["tokens"] == [50, 50, 50]
