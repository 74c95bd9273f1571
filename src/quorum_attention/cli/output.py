"""What commands print."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from quorum_attention.cli.process import nobody_reads
from quorum_attention.progress.lines import line

# Of tables in a pipe: nobody says how wide the place is that they will be read in.
_PIPE_COLUMNS = 80


def _columns() -> int:
    """Of the terminal, or as COLUMNS says; 0 in a pipe."""
    return get_terminal_size((0, 0)).columns


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        nobody_reads()


def say(text: str) -> None:
    """Print sentences: broken between words in a terminal, and nowhere for whoever reads a pipe."""
    columns, lines = _columns(), text.splitlines()
    if columns:
        how: Any = {"break_long_words": False, "break_on_hyphens": False}
        lines = [fill(one, columns, subsequent_indent="  ", **how) for one in lines]
    _print("\n".join(lines))


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
    """Print a table; where it is too wide, words break first.

    Args:
        columns: their headings.
        rows: a text for every column.
        title: a line above it.
        left: columns of words, which like the first are aligned to the left.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        side: Any = "left" if column in (columns[0], *left) else "right"
        table.add_column(column, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    shown = Console(file=io.StringIO(), width=_columns() or _PIPE_COLUMNS, color_system=None)
    shown.print(table)
    if title:
        say(title)
    _print("\n".join(map(str.rstrip, shown.file.getvalue().splitlines())))  # type: ignore[attr-defined]


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    _print(json.dumps(result, indent=1, default=str))
