"""What becomes of attempts that fail: never a reward, never lost, bounded where the prompt is to blame."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from omnifleet.client.reward import ItemScore
from omnifleet.errors import OmnifleetError, Reason, retryable
from omnifleet.types import Generation, Identity, VersionSpan, WeightVersion
from tests.unit.loop_world import IMAGE, FakeTemplate, Row, rows, world


async def test_an_infrastructure_failure_is_never_a_reward_and_never_counts_against_a_prompt(
    tmp_path: Path,
) -> None:
    failures = 0

    async def flaky(identity: Identity, answer: Generation) -> None:
        nonlocal failures
        if identity.prompt_id == "p2" and failures < 4:
            failures += 1
            raise retryable(Reason.WORKER_LOST, "kill -9")

    with world(tmp_path, data=rows(6), max_epochs=1, attempts_per_prompt=1, steps=3) as w:
        w.rollout.behave = flaky
        await w.controller.run()
        assert w.ledger.counts().given_up == 0
        assert sorted(n for names in w.trained_prompts() for n in names) == [f"p{i}" for i in range(6)]
        assert {s.reward for b in w.policy.trained for s in b.samples} == {0.0, 0.1}


async def test_an_unscorable_reply_gets_no_reward_and_its_prompt_is_bounded(tmp_path: Path) -> None:
    def crash(scores: list[ItemScore]) -> list[ItemScore]:
        broken = OmnifleetError(Reason.DEADLINE, "the scorer took too long")
        return [replace(s, error=broken) for s in scores]

    with world(tmp_path, data=rows(2), max_epochs=1, attempts_per_prompt=2) as w:
        w.reward.behave = crash
        with pytest.raises(OmnifleetError, match="none of 1 held-out rows"):
            await w.controller.run()
    with world(tmp_path, data=rows(4), max_epochs=1, attempts_per_prompt=2, steps=9) as w:
        scored = w.reward.behave = lambda scores: scores if len(scores) == 1 else crash(scores)
        with pytest.raises(OmnifleetError, match="4 prompts were given up"):
            await w.controller.run()
        assert scored and w.ledger.counts().trajectories == 0


async def test_a_judge_that_is_away_counts_against_no_prompt_and_one_that_refuses_ends_the_run(
    tmp_path: Path,
) -> None:
    asked = 0

    def away(scores: list[ItemScore]) -> list[ItemScore]:
        nonlocal asked
        asked += 1
        gone = retryable(Reason.UNAVAILABLE, "the judge answered 503")
        return [replace(s, error=gone) for s in scores] if asked % 2 and len(scores) > 1 else scores

    with world(tmp_path / "away", data=rows(4), max_epochs=1, attempts_per_prompt=1, steps=2) as w:
        w.reward.behave = away
        await w.controller.run()
        assert w.ledger.counts().given_up == 0 and len(w.policy.trained) == 2
    spent = OmnifleetError(Reason.FORBIDDEN, "the budget of 10 calls is spent", knob="budget_calls")
    with world(tmp_path / "spent", data=rows(4)) as w:
        w.reward.behave = lambda scores: [replace(s, error=spent) for s in scores]
        with pytest.raises(OmnifleetError, match="budget_calls"):
            async with asyncio.timeout(60):
                await w.controller.run()


async def test_a_sample_of_another_prompt_is_refused_and_counted(tmp_path: Path) -> None:
    async def other_tokenizer(identity: Identity, answer: Generation) -> None:
        if identity.prompt_id == "p1":
            answer.prompt_hash = "0" * 64

    with world(tmp_path, data=rows(6), max_epochs=1, attempts_per_prompt=2, steps=9) as w:
        w.rollout.behave = other_tokenizer
        await w.controller.run()
        assert w.counters.count("refused_prompt_hash") == 2
        assert "p1" not in {name for names in w.trained_prompts() for name in names}


async def test_a_picture_s_token_in_the_text_of_a_row_without_pictures_is_refused_counted_and_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tokenizer reads the token's name in a text as the token. The reference masks such a place; here the row does not train."""
    plain = FakeTemplate.render

    def reading(self: FakeTemplate, text: str, pictures: int) -> list[int]:
        before, *rest = text.split("<|image_pad|>")
        return plain(self, before, pictures) + [i for part in rest for i in (IMAGE, *plain(self, part, 0))]

    monkeypatch.setattr(FakeTemplate, "render", reading)
    data = [*rows(5), Row("literal", "what does <|image_pad|> mean?", (), "a token")]
    with world(tmp_path, data=data, max_epochs=1, attempts_per_prompt=2, steps=9) as w:
        await w.controller.run()
        assert w.counters.count("attempts_prompt_error") == 2 and w.ledger.counts().given_up == 1
        trained = {name for names in w.trained_prompts() for name in names}
        assert trained and "literal" not in trained
        assert "literal" not in {call.prompt_id for call in w.rollout.calls}
    assert "prompt literal" in caplog.text and "1 media placeholders" in caplog.text


async def test_another_logprobs_mode_ends_the_run_with_the_knob(tmp_path: Path) -> None:
    async def wrong_mode(identity: Identity, answer: Generation) -> None:
        raise OmnifleetError(
            Reason.LOGPROBS_MODE, "this engine gives raw logprobs", knob="rollout.logprobs_mode"
        )

    with world(tmp_path) as w:
        w.rollout.behave = wrong_mode
        with pytest.raises(OmnifleetError, match=r"rollout\.logprobs_mode"):
            async with asyncio.timeout(10):
                await w.controller.run()
        assert w.ledger.counts().in_flight == 0


async def test_tokens_of_another_lineage_are_dropped_as_stale(tmp_path: Path) -> None:
    calls = 0

    async def old_life(identity: Identity, answer: Generation) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            answer.samples[0].spans = [VersionSpan(WeightVersion("run", "before", 0), 0, 3)]

    with world(tmp_path) as w:
        w.rollout.behave = old_life
        await w.controller.run()
        assert w.counters.count("attempts_stale") == 1
