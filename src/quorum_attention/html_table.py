"""Small tables for notebooks: HTML without colours of its own, so that light and dark themes
both have theirs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_CELL = "text-align:left;vertical-align:top;padding:.15em 1em .15em 0;background:none"
# A page without a doctype gives tables colours and sizes of their own.
_TABLE = "border-collapse:collapse;border:none;margin:0;color:inherit;font-size:inherit"
_CAPTION = "caption-side:top;text-align:left;font-weight:bold;padding:.3em 0;color:inherit"


def html_table(
    caption: str, rows: Iterable[tuple[str, Sequence[str]]], columns: Sequence[str] = ()
) -> str:
    """A table as HTML; everything in it is escaped.

    Args:
        caption: a line above it.
        rows: what a row is called, and its cells. The last cell of a short row takes the rest.
        columns: names of the columns of cells; none has no line of names.
    """
    lines = [("", columns), *rows] if columns else list(rows)
    width = max((len(cells) for _, cells in lines), default=0)
    html = ""
    for name, cells in lines:
        row = f'<th scope="row" style="{_CELL};font-weight:normal;opacity:.7">{escape(name)}</th>'
        for number, cell in enumerate(cells, start=1):
            span = width - number + 1 if number == len(cells) else 1
            wide = f' colspan="{span}"' if span > 1 else ""
            row += f'<td style="{_CELL}"{wide}>{escape(cell)}</td>'
        html += f'<tr style="background:none">{row}</tr>'
    top = f'<caption style="{_CAPTION}">{escape(caption)}</caption>'
    return f'<table style="{_TABLE}">{top}{html}</table>'
