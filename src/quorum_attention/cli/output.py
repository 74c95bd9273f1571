"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest
from typing import Any, NamedTuple

from rich.cells import cell_len
from rich.console import Console
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
    if title:
        say(title)
    styles = ["red" if number in red else None for number in range(len(rows))]
    words = [column == columns[0] or column in left for column in columns]
    turned = [list(line) for line in zip(columns, *rows, strict=True)]
    upright = _table(out, columns, rows, words, styles)
    sideways = _table(out, turned[0], turned[1:], [True] * len(turned[0]), beside=[None, *styles])
    if upright.most <= out.width or (len(rows) > _FEW and upright.least <= out.width):
        out.print(upright.table)
    elif len(rows) <= _FEW and sideways.least <= out.width:
        out.print(sideways.table)
    elif upright.least <= out.width:
        out.print(upright.table)
    else:
        for row, style in zip(rows, styles, strict=True):
            pairs = list(zip(columns, row, strict=True))
            out.print(_table(out, (), pairs, [True, True], [style] * len(row)).table)


class _Fitted(NamedTuple):
    """A table as wide as its console, at most; the width that it needs at least, and at most."""

    table: Table
    least: int
    most: int


def _table(
    out: Console,
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    words: Sequence[bool],
    styles: Sequence[str | None] = (),
    beside: Sequence[str | None] = (),
) -> _Fitted:
    """A table whose lines break between words only; without columns, one without a heading.

    ``styles`` are of rows, ``beside`` of columns.
    """
    table = Table(show_header=bool(columns))
    cells = [[*columns[n : n + 1], *(row[n] for row in rows)] for n in range(len(words))]
    longest = [max(map(cell_len, " ".join(one).split()), default=0) for one in cells]
    least = [min(n, _LONGEST_WORD) for n in longest]
    most = [max(map(cell_len, one), default=0) for one in cells]
    borders = 3 * len(words) + 1
    spare = max(0, out.width - borders - sum(least))
    widths = list(least)
    for place in sorted(range(len(words)), key=words.__getitem__):  # numbers first
        widths[place] += min(spare, most[place] - least[place])
        spare -= widths[place] - least[place]
    for place, is_words in enumerate(words):
        table.add_column(
            columns[place] if columns else "",
            justify="left" if is_words else "right",
            width=widths[place],
            style=(beside[place] if beside else None) or "",
        )
    for row, style in zip_longest(rows, styles):
        table.add_row(*(Text(cell) for cell in row), style=style)
    return _Fitted(table, borders + sum(least), borders + sum(most))


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    try:
        print(json.dumps(result, indent=1, default=str), flush=True)
    except BrokenPipeError:
        nobody_reads()
