"""A contact sheet of rows: pictures with question and answer, as one HTML page or one PNG."""

from __future__ import annotations

import base64
import html
import io
import textwrap
from collections.abc import Sequence

from PIL import Image, ImageDraw

from omnifleet.errors import Reason, invalid
from omnifleet_trainer.data.rows import PromptRow

_SIDE = 192
_LINES = 7
_LINE = 13
_COLUMNS = 5


def html_sheet(rows: Sequence[PromptRow], title: str) -> str:
    """A page without scripts or other files; what rows say is escaped."""
    cards = "\n".join(_card(row) for row in rows)
    style = (
        "body{font:14px sans-serif;margin:16px}main{display:flex;flex-wrap:wrap;gap:12px}"
        "article{width:240px;border:1px solid #ccc;padding:8px}img{max-width:100%}pre{white-space:pre-wrap}"
    )
    head = f"<meta charset=utf-8><title>{html.escape(title)}</title><style>{style}</style>"
    return f"<!doctype html>{head}<h1>{html.escape(title)}</h1><main>\n{cards}\n</main>\n"


def _card(row: PromptRow) -> str:
    pictures = "".join(
        f'<img alt="" src="data:image/png;base64,{base64.b64encode(_thumbnail(data)).decode()}">'
        for data in row.images
    )
    media = "".join(f"<p>{html.escape(url[:120])}</p>" for url in (*row.clips, *row.sounds))
    return (
        f"<article>{pictures}{media}<pre>{html.escape(row.text)}</pre>"
        f"<p><b>{html.escape(row.answer)}</b></p><small>{html.escape(row.prompt_id)}</small></article>"
    )


def png_sheet(rows: Sequence[PromptRow]) -> bytes:
    """A grid of rows, the first picture of each; text is cut to what fits."""
    tall = _SIDE + _LINES * _LINE
    columns = min(_COLUMNS, max(len(rows), 1))
    sheet = Image.new("RGB", (columns * _SIDE, -(-len(rows) // columns) * tall), "white")
    pen = ImageDraw.Draw(sheet)
    for at, row in enumerate(rows):
        x, y = at % columns * _SIDE, at // columns * tall
        if row.images:
            with Image.open(io.BytesIO(_thumbnail(row.images[0]))) as small:
                sheet.paste(small, (x, y))
        lines = [*textwrap.wrap(row.text, 30)[: _LINES - 2], f"= {row.answer[:28]}"]
        for line, text in enumerate(lines):
            pen.text((x + 2, y + _SIDE + line * _LINE), text, fill="black")
    out = io.BytesIO()
    sheet.save(out, "PNG")
    return out.getvalue()


def _thumbnail(data: bytes) -> bytes:
    try:
        with Image.open(io.BytesIO(data)) as image:
            small = image.convert("RGB")
    except (OSError, ValueError) as error:
        raise invalid(f"a picture cannot be decoded: {error}", reason=Reason.INVALID_MEDIA) from error
    small.thumbnail((_SIDE - 4, _SIDE - 4))
    out = io.BytesIO()
    small.save(out, "PNG")
    return out.getvalue()
