"""Tables as text: lines with the runs that they show, and where these come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from runs import Row, Run

H200 = "NVIDIA H200"
Seconds = tuple[float, float]
"""Of a forward; of a forward and its backward."""


class Line(NamedTuple):
    """A line of a table, and the measurements that it shows: none for figures of the
    paper."""

    cells: list[str]
    rows: Sequence[Row] = ()

    @property
    def is_old(self) -> bool:
        """Whether a measurement is of older code than the present."""
        return any(row.run.is_old for row in self.rows)


class Table(NamedTuple):
    """A table of a page."""

    columns: Sequence[str]
    lines: Sequence[Line]

    def of_age(self, is_old: bool) -> Table:
        """The lines of older code, or those of the present code. Figures of the paper
        stand beside both."""
        lines = [line for line in self.lines if not line.rows or line.is_old == is_old]
        return self._replace(lines=lines)

    def runs(self) -> list[Run]:
        """The runs that lines show, each once."""
        runs = {row.run.file: row.run for line in self.lines for row in line.rows}
        return list(runs.values())

    def text(self) -> str:
        """The table with a column of commits, and below it where the figures come
        from. A table without measurements has neither."""
        if not self.runs():
            return table_text(self.columns, [line.cells for line in self.lines])
        rows = [[*line.cells, commits_of(line)] for line in self.lines]
        runs = describe_runs(self.runs())
        return f"{table_text([*self.columns, 'commit'], rows)}\n{runs}"


def table_text(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def commits_of(line: Line) -> str:
    """The commits of a line, or a date if a run did not write its commit down."""
    origins = [row.run.origin for row in line.rows]
    commits = [origin["commit"] or origin["date"] for origin in origins]
    return ", ".join(dict.fromkeys(commits))


def describe_runs(runs: Iterable[Run]) -> str:
    """A line for each run: the command, the date, the commit, and the raw file."""
    return "".join(f"* {describe_run(run)}\n" for run in runs)


def describe_run(run: Run) -> str:
    origin = run.origin
    words = [f"`{origin['command']}`", origin["date"]]
    if origin["commit"]:
        words.append(f"commit {origin['commit']}")
    if origin.get("is_clean") is False:
        words.append("with changes")
    if run_note(run):
        words.append(run_note(run))
    words += [*describe_versions(run), f"[raw](../benchmarks/results/{run.file})"]
    return ", ".join(words)


def run_note(run: Run) -> str:
    """What somebody wrote about a run; lists of a program are no note."""
    note: str = run.origin.get("note", "")
    return "" if note.startswith("runs: ") else note


def describe_versions(run: Run) -> list[str]:
    """The machine if it is no H200, and torch."""
    versions = run.origin["versions"]
    machine = [] if run.origin["machine"] == H200 else [run.origin["machine"]]
    return [*machine, f"torch {versions['torch'].partition('+')[0]}"]


def later_seconds(calls: Sequence[Sequence[float]]) -> Seconds:
    """Medians of the calls after the first."""
    forward, backward = (
        median(part) for part in zip(*(calls[1:] or calls), strict=True)
    )
    return forward, forward + backward


def ratio_cell(case: dict[str, Any], rival: str, ours: str = "now") -> str:
    """The time of ours over that of a rival; empty if the rival was not measured."""
    if rival not in case:
        return ""
    our_seconds = later_seconds(case[ours])
    rival_seconds = later_seconds(case[rival])
    ratios = [a / b for a, b in zip(our_seconds, rival_seconds, strict=True)]
    return "; ".join(f"{ratio:.2f}" for ratio in ratios)


def gib(size: int) -> str:
    """GiB; the head of the column names the unit."""
    return f"{size / 2**30:.0f}"


def mib(size: int | None) -> str:
    """MiB; the head of the column names the unit."""
    return "not recorded" if size is None else f"{size / 2**20:.0f}"
