"""What is being done, and what has been done: of commands that take a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from quorum_attention.progress.lines import line
from quorum_attention.progress.terminal import can_redraw, live

if TYPE_CHECKING:
    from rich.progress import Progress


class Status:
    """Shows what is being done, and what has been done."""

    def __init__(self, progress: Progress | None = None, first: str = "") -> None:
        self._progress = progress
        self._shown = None if progress is None else progress.add_task(first, total=None)

    def __call__(self, text: str) -> None:
        """Show ``text``: in place in a terminal, elsewhere on a line of its own."""
        if self._progress is None or self._shown is None:
            line(text)
        else:
            self._progress.update(self._shown, description=text)

    def done(self, text: str) -> None:
        """Print ``text`` on a line that stays."""
        if self._progress is None:
            line(text)
        else:
            self._progress.console.print(text, markup=False, highlight=False, emoji=False)


@contextmanager
def status_line(first: str) -> Iterator[Status]:
    """A ``Status`` that shows on stderr what is being done; in a terminal it begins with
    ``first``."""
    if not can_redraw():
        yield Status()
        return
    from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}", markup=False), TimeElapsedColumn())
    with live(*columns) as progress:
        yield Status(progress, first)
