"""What commands print."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from rich.cells import cell_len
from rich.console import Console
from rich.table import Table
from rich.text import Text

from quorum_attention.cli.process import nobody_reads
from quorum_attention.progress.lines import environment, line

# Of tables, where nobody says how wide the place is that they will be read in.
_PIPE_COLUMNS = 132


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
) -> None:
    """Print a table; where the width does not allow that, row by row.

    Args:
        columns: their headings.
        rows: a text for every column.
        title: a line above it.
        left: columns of words, which like the first are aligned to the left and may break.
    """
    out = console()
    if title:
        say(title)
    table, least = Table(), 3 * len(columns) + 1
    for column, *cells in zip(columns, *rows, strict=True):
        # Columns of words break between words, columns of figures nowhere.
        is_words, texts = column in (columns[0], *left), [column, *cells]
        least += max(map(cell_len, " ".join(texts).split() if is_words else texts), default=0)
        table.add_column(column, justify="left" if is_words else "right", no_wrap=not is_words)
    if least <= out.width:
        for row in rows:
            table.add_row(*map(Text, row))
        out.print(table)
        return
    for row in rows:
        pairs = Table(show_header=False)
        for pair in zip(columns, row, strict=True):
            pairs.add_row(*map(Text, pair))
        out.print(pairs)


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    try:
        print(json.dumps(result, indent=1, default=str), flush=True)
    except BrokenPipeError:
        nobody_reads()
