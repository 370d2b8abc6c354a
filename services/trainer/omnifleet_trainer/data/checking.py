"""Is a set fit for training? Every row is loaded, decoded, measured, and judged by the reward service itself."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from omnifleet.client.reward import ItemScore, RewardClient, ScoreItem
from omnifleet.config.recipe import Recipe, ScorerConfig, SplitConfig
from omnifleet.errors import OmnifleetError, Reason, invalid
from omnifleet.processor import read_image_processor
from omnifleet.types import Identity, Mark
from omnifleet.vision_grid import qwen2vl_grid
from omnifleet_trainer.data.children import service
from omnifleet_trainer.data.rows import PromptRow

_BATCH = 256
_DEADLINE_S = 300.0
Measure = Callable[[PromptRow], int]
"""Row -> tokens of its expanded prompt."""


@dataclass(frozen=True, slots=True)
class Fault:
    """What is wrong with a row. number: its place in the set."""

    number: int
    prompt_id: str
    error: OmnifleetError


def checked(
    rows: Sequence[PromptRow], *, limit: int, measure: Measure | None
) -> Iterator[tuple[PromptRow | None, Fault | None]]:
    """Each row, or why it cannot be used. measure None: prompts are not measured."""
    for number in range(len(rows)):
        try:
            row = rows[number]
        except OmnifleetError as error:
            yield None, Fault(number, "", error)
            continue
        try:
            _check(row, limit, measure)
        except OmnifleetError as error:
            yield row, Fault(number, row.prompt_id, error)
        else:
            yield row, None


def _check(row: PromptRow, limit: int, measure: Measure | None) -> None:
    for at, picture in enumerate(row.images):
        try:
            with Image.open(io.BytesIO(picture)) as image:
                image.load()
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise invalid(f"picture {at} cannot be decoded: {error}", reason=Reason.INVALID_MEDIA) from error
    if not row.text.strip():
        raise invalid("the prompt is empty")
    if not row.answer.strip():
        raise invalid("the answer is empty")
    tokens = measure(row) if measure is not None else 0
    if tokens > limit:
        raise invalid(
            f"the prompt has {tokens} tokens, at most {limit}",
            knob="data.max_prompt_tokens",
            reason=Reason.PROMPT_TOO_LONG,
        )


def prompt_measure(model: Path, *, trust_remote_code: bool) -> Measure | None:
    """Tokens of text and pictures under a checkpoint's own template; clips and sounds are not counted.

    None where there is no checkpoint, or its pictures follow no rule that is known here. Raises MODEL_MISSING.
    """
    if not model.is_dir():
        return None
    from omnifleet_trainer.rendering import load_template

    processor = read_image_processor(model)
    if not processor.class_name.startswith("Qwen2VL"):
        return None
    template = load_template(model, trust_remote_code=trust_remote_code)

    def measure(row: PromptRow) -> int:
        text = len(template.render(row.text, len(row.images)))
        for picture in row.images:
            with Image.open(io.BytesIO(picture)) as image:
                text += qwen2vl_grid(processor.config, image.height, image.width).tokens - 1
        return text

    return measure


async def unscorable(
    rows: Sequence[tuple[int, PromptRow]], scorers: Sequence[ScorerConfig], recipe: Recipe
) -> list[Fault]:
    """Rows that the scorers cannot judge, whatever a model says: each is given its own answer.

    Scorers that ask other services are left out: a check costs nobody's budget.
    """
    local = [scorer for scorer in scorers if scorer.name not in ("judge", "remote")]
    if not local or not rows:
        return []
    modules = json.dumps(list(recipe.reward_service.modules))
    faults = []
    async with service("reward", [f"reward_service.modules={modules}"]) as (address, secret):
        async with RewardClient.open(address, secret, name="data-check") as reward:
            for start in range(0, len(rows), _BATCH):
                batch = rows[start : start + _BATCH]
                items = [_item(number, row) for number, row in batch]
                for (number, row), score in zip(
                    batch, await reward.score(items, local, _DEADLINE_S), strict=True
                ):
                    if (error := score.error or _unread(score)) is not None:
                        faults.append(Fault(number, row.prompt_id, error))
    return faults


def _unread(score: ItemScore) -> OmnifleetError | None:
    """A reward that cannot read a row's own answer would give every reply the same."""
    names = [name for name, mark in score.marks.items() if mark is not Mark.SCORED]
    return invalid(f"{', '.join(names)} cannot read the row's own answer") if names else None


def _item(number: int, row: PromptRow) -> ScoreItem:
    said = f"<think>x</think> <answer>{row.answer}</answer> \\boxed{{{row.answer}}}"
    return ScoreItem(
        id=str(number),
        response=said,
        ground_truth=row.answer,
        identity=Identity("data-check"),
        prompt=row.text,
        media=(),
        extra={**row.extra, "task": row.task},
        prompt_suffix="",
    )


def scorers_of(recipe: Recipe, split: SplitConfig) -> Sequence[ScorerConfig]:
    """What judges a set; none where an environment may judge itself."""
    if split.environment and not split.environment.endswith(":AskOnce"):
        return ()
    return split.reward or recipe.reward
