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

from quorum_attention.cli.process import ignore_broken_pipe
from quorum_attention.plain_types import JsonObject
from quorum_attention.progress.lines import line

# The width of tables in a pipe, where the reader's width is unknown.
_PIPE_COLUMNS = 80


def _columns() -> int:
    """The width of the terminal, or COLUMNS; 0 in a pipe."""
    return get_terminal_size((0, 0)).columns


def _print(text: str) -> None:
    try:
        print(text, flush=True)
    except BrokenPipeError:
        ignore_broken_pipe()


def say(text: str) -> None:
    """Print sentences. Lines are broken between words in a terminal, and not broken in
    a pipe."""
    lines = text.splitlines()
    columns = _columns()
    if columns:
        lines = [
            fill(
                sentence,
                columns,
                subsequent_indent="  ",
                break_long_words=False,
                break_on_hyphens=False,
            )
            for sentence in lines
        ]
    _print("\n".join(lines))


def warn(text: str) -> None:
    """Print a sentence on stderr, where it is seen beside JSON as well."""
    line(f"quorum-attention: {text}")


def show_table(
    columns: Sequence[str],
    rows: Sequence[Sequence[str]],
    *,
    title: str = "",
    words: Sequence[str] = (),
) -> None:
    """Print a table; where it is too wide, words break first.

    Args:
        columns: their headings.
        rows: a text for each column.
        title: a line above it.
        words: columns that are aligned to the left, as the first one always is.
    """
    table = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        side: Any = "left" if column in (columns[0], *words) else "right"
        table.add_column(column, justify=side, overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    shown = Console(
        file=io.StringIO(), width=_columns() or _PIPE_COLUMNS, color_system=None
    )
    shown.print(table)
    if title:
        say(title)
    _print("\n".join(map(str.rstrip, shown.file.getvalue().splitlines())))  # type: ignore[attr-defined]


def print_json(result: JsonObject) -> None:
    """JSON for machines, on stdout."""
    _print(json.dumps(result, indent=1, default=str))
