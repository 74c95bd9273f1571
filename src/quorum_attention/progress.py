"""A progress bar with the time left, on stderr."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def progress_bar() -> Iterator[Callable[[int, int, str], None]]:
    """A callable (done, total, label) that draws; the bar goes away with the ``with`` block."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        ids = {}

        def update(done: int, total: int, label: str) -> None:
            if label not in ids:
                ids[label] = bar.add_task(label, total=total)
            bar.update(ids[label], completed=done, total=total)

        yield update
