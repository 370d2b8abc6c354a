"""A two-turn visual puzzle: a digit too small to read; the model names a quarter, sees it enlarged, then reads the digit.

The second picture is made by the environment from what the model said: it exists in this episode only.
"""

from __future__ import annotations

import io
import random
import re
from collections.abc import Sequence

from PIL import Image, ImageDraw

from omnifleet.environments import Environment, Outcome, Scored, Session, Task

QUARTERS = ("upper left", "upper right", "lower left", "lower right")


class ZoomPuzzle(Environment):
    """side: width and height of the pictures, pixels."""

    def __init__(self, side: int = 56) -> None:
        self._side = side

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """Digits drawn on the spot; `size` None = 256."""
        return [self._task(split, at, seed) for at in range(size or 256)]

    def _task(self, split: str, at: int, seed: int) -> Task:
        dice = random.Random(f"{seed}/{split}/{at}")
        quarter, digit = dice.randrange(4), dice.randrange(10)
        image = Image.new("RGB", (self._side, self._side), "white")
        half = self._side // 2
        place = (quarter % 2 * half + half // 3, quarter // 2 * half + half // 3)
        ImageDraw.Draw(image).text(place, str(digit), fill="black")
        return Task(
            id=f"{at:06d}",
            text=f"In which quarter is a digit: {', '.join(QUARTERS)}?",
            answer=str(digit),
            pictures=(_png(image),),
            extra={"quarter": quarter, "place": list(place)},
        )

    async def run(self, session: Session) -> Outcome:
        """0.5 for the quarter, 0.5 for the digit."""
        first = await session.ask(*session.task.media, session.task.text)
        found = [at for at, name in enumerate(QUARTERS) if name in first.text.lower()]
        looked = found[0] if len(found) == 1 else 0
        second = await session.ask(self._zoom(session.task, looked), "That quarter, enlarged. Which digit?")
        right = float(found == [session.task.extra["quarter"]])
        read = re.findall(r"\d", second.text)
        digit = float(read[-1:] == [session.task.answer])
        return Scored((right + digit) / 2, {"quarter": right, "digit": digit})

    def _zoom(self, task: Task, quarter: int) -> bytes:
        image = Image.new("RGB", (self._side, self._side), "white")
        if quarter == task.extra["quarter"]:
            third = self._side // 3
            ImageDraw.Draw(image).text((third, third), task.answer, fill="black", font_size=third)
        return _png(image)


def _png(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue()
