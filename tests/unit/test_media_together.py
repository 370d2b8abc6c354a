"""Steps of an index that wait together run together, in order, and fail alone."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from omnifleet_media.index.sqlite import SqliteIndex
from omnifleet_media.index.together import Outcome, Step, Together


async def test_neighbours_of_one_kind_share_a_run_in_order() -> None:
    runs: list[tuple[bool, list[int]]] = []

    def run(steps: Sequence[Step], writes: bool) -> list[Outcome]:
        answers = [step(None) for step in steps]
        runs.append((writes, answers))
        return [(answer,) for answer in answers]

    with ThreadPoolExecutor(1) as thread:
        together = Together(thread, run)

        def asked(number: int, writes: bool) -> Any:
            return together.do(lambda _: number, writes=writes)

        kinds = [True, True, False, True]
        assert await asyncio.gather(*(asked(i, kind) for i, kind in enumerate(kinds))) == [0, 1, 2, 3]
        assert runs == [(True, [0, 1]), (False, [2]), (True, [3])]
        assert await asked(4, True) == 4


async def test_a_run_that_fails_fails_its_steps_and_no_later_one() -> None:
    def run(steps: Sequence[Step], writes: bool) -> list[Outcome]:
        if writes:
            raise RuntimeError("no room")
        return [(step(None),) for step in steps]

    with ThreadPoolExecutor(1) as thread:
        together = Together(thread, run)
        failed = await asyncio.gather(
            *(together.do(lambda _: 1, writes=True) for _ in range(2)), return_exceptions=True
        )
        assert [str(error) for error in failed] == ["no room"] * 2
        assert await together.do(lambda _: 2, writes=False) == 2


async def test_a_step_that_fails_undoes_itself_alone(tmp_path: Path) -> None:
    index = SqliteIndex(tmp_path / "index.sqlite")

    def source(name: str, *, fails: bool = False) -> Any:
        def step(db: Any) -> None:
            db.execute("INSERT INTO sources VALUES (?, 0, 0)", (name,))
            if fails:
                raise ValueError("after its write")

        return index._write(step)

    outcomes = await asyncio.gather(
        source("a"), source("b", fails=True), source("a"), source("c"), return_exceptions=True
    )
    assert isinstance(outcomes[1], ValueError)
    assert isinstance(outcomes[2], Exception)  # the name is taken
    assert [outcomes[0], outcomes[3]] == [None, None]
    held = await index._read(lambda db: [row[0] for row in db.execute("SELECT digest FROM sources")])
    assert sorted(held) == ["a", "c"]
    with pytest.raises(ValueError, match="after its write"):
        await source("b", fails=True)
    await index.close()
