"""Small tables for notebooks: HTML without colours of its own, so that light and dark themes
both have theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CELL = "text-align:left;vertical-align:top;padding:.15em 1em .15em 0;background:none"
# A page without a doctype gives tables colours and sizes of their own.
_TABLE = "border-collapse:collapse;border:none;margin:0;color:inherit;font-size:inherit"
_SOFT = f"{_CELL};font-weight:normal;opacity:.7"


def html_table(
    caption: str, rows: Iterable[tuple[str, Sequence[str]]], columns: Sequence[str] = ()
) -> str:
    """A table as HTML; everything in it is escaped.

    Args:
        caption: a line above it.
        rows: what a row is called, and its cells. A row with fewer cells than others has a last
            cell that takes the rest of the line.
        columns: names of the columns of cells; none has no line of names.
    """
    listed = [(name, list(cells)) for name, cells in rows]
    width = max([len(columns), *(len(cells) for _, cells in listed)], default=0)
    lines = []
    if columns:
        names = "".join(f'<th style="{_SOFT}">{escape(name)}</th>' for name in columns)
        lines.append(f'<tr style="background:none"><th style="{_SOFT}"></th>{names}</tr>')
    for name, cells in listed:
        rest = width - len(cells) + 1
        filled = "".join(
            f'<td style="{_CELL}"{_span(rest if number == len(cells) else 1)}>{escape(cell)}</td>'
            for number, cell in enumerate(cells, start=1)
        )
        head = f'<th scope="row" style="{_SOFT}">{escape(name)}</th>'
        lines.append(f'<tr style="background:none">{head}{filled}</tr>')
    top = "caption-side:top;text-align:left;font-weight:bold;padding:.3em 0;color:inherit"
    return (
        f'<table style="{_TABLE}">'
        f'<caption style="{top}">{escape(caption)}</caption>{"".join(lines)}</table>'
    )


def _span(columns: int) -> str:
    return f' colspan="{columns}"' if columns > 1 else ""
