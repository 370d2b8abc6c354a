"""Tables for terminals of 80 columns: no frames, one space between columns, and nothing cut off."""

from __future__ import annotations

from rich import box
from rich.table import Table


def open_table(title: str = "", *, gap: int = 2) -> Table:
    """A table without a frame. gap: spaces between its columns."""
    return Table(
        title=title or None,
        title_justify="left",
        box=box.Box("    \n    \n ─  \n    \n    \n    \n    \n    \n"),
        show_edge=False,
        pad_edge=False,
        padding=(0, gap - 1, 0, 0),
    )


def add_columns(table: Table, *names: str, right: tuple[str, ...] = (), folded: tuple[str, ...] = ()) -> None:
    """Columns by name. right: of numbers. folded: goes on in another line where there is no room; the others never do."""
    for name in names:
        table.add_column(
            name,
            justify="right" if name in right else "left",
            no_wrap=name not in folded,
            overflow="fold",
        )
