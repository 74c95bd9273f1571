"""What commands print."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.table import Table

# Of tables, where nobody says how wide the place is that they will be read in.
_PIPE_COLUMNS = 132


def console() -> Console:
    """Text for people, on stdout: as wide as the terminal, or as COLUMNS says."""
    found = Console()
    if found.is_terminal or os.environ.get("COLUMNS", "").isdigit():
        return found
    return Console(width=_PIPE_COLUMNS)


def say(text: str) -> None:
    """Print sentences: broken between words in a terminal, and nowhere for whoever reads a pipe."""
    out = console()
    out.print(text, highlight=False, markup=False, soft_wrap=not out.is_terminal)


def warn(text: str) -> None:
    """Print a sentence on stderr, where it is seen beside JSON as well."""
    print(f"quorum-attention: {text}", file=sys.stderr)


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    left: Sequence[str] = (),
    red: Sequence[int] = (),
) -> None:
    """Print a table as the width allows: upright, on its side, or row by row.

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
    words = {columns[0], *left}
    upright = Table()
    for column in columns:
        upright.add_column(column, justify="left" if column in words else "right", no_wrap=True)
    for number, row in enumerate(rows):
        upright.add_row(*row, style="red" if number in red else None)
    if Measurement.get(out, out.options, upright).maximum <= out.width:
        out.print(upright)
        return
    sideways = Table()
    for heading in (columns[0], *(row[0] for row in rows)):
        sideways.add_column(heading)
    for place, column in enumerate(columns[1:], 1):
        sideways.add_row(column, *(row[place] for row in rows))
    if Measurement.get(out, out.options.update(width=1000), sideways).minimum <= out.width:
        out.print(sideways)
        return
    for number, row in enumerate(rows):
        single = Table(show_header=False)
        for heading, cell in zip(columns, row, strict=True):
            single.add_row(heading, cell, style="red" if number in red else None)
        out.print(single)


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    print(json.dumps(result, indent=1, default=str))
