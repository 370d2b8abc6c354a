"""Circle-click with a tool: look at coloured circles, click the one that is asked for. One call, 1 if it hits.

Needs a model that calls tools and `gateway.tool_parser`.
"""

from __future__ import annotations

import io
import math
import random
from collections.abc import Sequence

from PIL import Image, ImageDraw

from omnifleet.environments import Environment, Outcome, PromptError, Scored, Session, Task

COLOURS = ("red", "green", "blue", "orange", "purple", "cyan", "black", "brown")
CLICK = {
    "type": "function",
    "function": {
        "name": "click",
        "description": "Click at a point of the picture, in pixels from its upper left corner.",
        "parameters": {
            "type": "object",
            "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}},
            "required": ["x", "y"],
        },
    },
}


class CircleClick(Environment):
    """size: width and height of the canvas, pixels."""

    def __init__(self, size: int = 1000) -> None:
        self._size = size

    def tasks(self, split: str, size: int | None, seed: int) -> Sequence[Task]:
        """Canvases drawn on the spot; `size` None = 256."""
        return [self._task(split, at, seed) for at in range(size or 256)]

    def _task(self, split: str, at: int, seed: int) -> Task:
        dice = random.Random(f"{seed}/{split}/{at}")
        circles: dict[str, tuple[int, int, int]] = {}
        colours, wanted = dice.sample(COLOURS, len(COLOURS)), dice.randint(3, 5)
        while len(circles) < wanted:
            radius = int(self._size * dice.uniform(0.06, 0.15))
            x, y = (dice.randint(radius, self._size - radius) for _ in range(2))
            if all(math.dist((x, y), other[:2]) > radius + other[2] for other in circles.values()):
                circles[colours[len(circles)]] = (x, y, radius)
        target = dice.choice(list(circles))
        return Task(
            id=f"{at:06d}",
            text=f"Click the {target} circle.",
            pictures=(self._draw(circles),),
            extra={"circle": list(circles[target])},
        )

    def _draw(self, circles: dict[str, tuple[int, int, int]]) -> bytes:
        image = Image.new("RGB", (self._size, self._size), "white")
        pen = ImageDraw.Draw(image)
        for colour, (x, y, radius) in circles.items():
            pen.ellipse((x - radius, y - radius, x + radius, y + radius), fill=colour)
        out = io.BytesIO()
        image.save(out, "PNG")
        return out.getvalue()

    async def run(self, session: Session) -> Outcome:
        """One reply; its first click counts."""
        circle = session.task.extra.get("circle")
        if not circle:
            return PromptError("the row has no circle")
        reply = await session.ask(*session.task.media, session.task.text, tools=[CLICK])
        for call in reply.tool_calls:
            if call.name == "click" and call.arguments is not None:
                point = call.arguments.get("x"), call.arguments.get("y")
                if not all(type(value) is int for value in point):
                    return Scored(0.0, {"called": 0.0})
                hit = math.dist(point, circle[:2]) <= circle[2]
                return Scored(float(hit), {"called": 1.0})
        return Scored(0.0, {"called": 0.0})
