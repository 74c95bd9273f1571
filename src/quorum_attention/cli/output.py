"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from quorum_attention.cli.streams import nobody_reads
from quorum_attention.progress.lines import environment, line

# Of tables, where nobody says how wide the place is that they will be read in.
_PIPE_COLUMNS = 132
# Rows that can stand side by side; and words no longer than this are not broken.
_FEW, _LONGEST_WORD = 4, 24


class _Console(Console):
    def on_broken_pipe(self) -> None:
        """Go on; rich would end the process, with a failure."""
        nobody_reads()


def console() -> Console:
    """Text for people, on stdout: as wide as the terminal, or as COLUMNS says."""
    # What is printed is data (paths, names of extras, messages): [x] and :x: are not markup.
    sizes = environment()
    found = _Console(markup=False, emoji=False, _environ=sizes)
    if found.is_terminal or "COLUMNS" in sizes:
        return found
    return _Console(width=_PIPE_COLUMNS, markup=False, emoji=False, _environ=sizes)


def say(text: str) -> None:
    """Print sentences: broken between words in a terminal, and nowhere for whoever reads a pipe."""
    out = console()
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def warn(text: str) -> None:
    """Print a sentence on stderr, where it is seen beside JSON as well."""
    line(f"quorum-attention: {text}")


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    left: Sequence[str] = (),
    red: Sequence[int] = (),
) -> None:
    """Print a table as the width allows: upright, on its side, with cells of several lines, or row
    by row.

    Args:
        columns: their headings.
        rows: a text for every column.
        title: a line above it.
        left: columns of words, which are aligned to the left like the first.
        red: numbers of rows that stand out.
    """
    out = console()
    endless = out.options.update(width=1000)
    if title:
        say(title)
    styles = ["red" if number in red else None for number in range(len(rows))]
    words = [column == columns[0] or column in left for column in columns]
    upright = _table(columns, rows, words, styles)
    whole = Measurement.get(out, endless, upright)
    if whole.maximum <= out.width:
        out.print(upright)
        return
    if len(rows) <= _FEW:
        turned = [list(line) for line in zip(columns, *rows, strict=True)]
        sideways = _table(turned[0], turned[1:], [True] * len(turned[0]), beside=[None, *styles])
        if Measurement.get(out, endless, sideways).minimum <= out.width:
            out.print(sideways)
            return
    if whole.minimum <= out.width:
        out.print(upright)
        return
    for row, style in zip(rows, styles, strict=True):
        out.print(
            _table((), list(zip(columns, row, strict=True)), [True, True], [style] * len(row))
        )


def _table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[bool],
    styles: Sequence[str | None] = (),
    beside: Sequence[str | None] = (),
) -> Table:
    """A table whose lines break between words only; without columns, one without a heading.

    ``styles`` are of rows, ``beside`` of columns.
    """
    table = Table(show_header=bool(columns))
    for place, is_words in enumerate(words):
        cells = [*columns[place : place + 1], *(row[place] for row in rows)]
        longest = max((len(word) for cell in cells for word in cell.split()), default=0)
        table.add_column(
            columns[place] if columns else "",
            justify="left" if is_words else "right",
            min_width=min(longest, _LONGEST_WORD),
            style=(beside[place] if beside else None) or "",
        )
    for row, style in zip_longest(rows, styles):
        table.add_row(*(Text(cell) for cell in row), style=style)
    return table


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    try:
        print(json.dumps(result, indent=1, default=str), flush=True)
    except BrokenPipeError:
        nobody_reads()
