"""Tables as text: lines with the runs that they show, and where these come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from runs import Row, Run

H200 = "NVIDIA H200"
# Figures of earlier runs are of older code, and are marked: date and time of day. Old
# runs did not write down the time.
BEGIN_OF_PRESENT_CODE = ("2026-11-29", "12:00")
OLD_MARK = "†"
Seconds = tuple[float, float]
"""Of a forward; of a forward and its backward."""


class Line(NamedTuple):
    """A line of a table, and the measurements that it shows: none for figures of the
    paper."""

    cells: list[str]
    rows: Sequence[Row] = ()


def section(columns: Sequence[str], lines: Sequence[Line]) -> str:
    """The table, and below it where the figures come from. Lines name their commits,
    with a mark at those of older code."""
    rows = [[*line.cells, commits_of(line)] for line in lines]
    return f"{table([*columns, 'commit'], rows)}\n{describe_runs(runs_of(lines))}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def runs_of(lines: Iterable[Line]) -> list[Run]:
    """The runs that lines show, each once."""
    runs = {row.run.file: row.run for line in lines for row in line.rows}
    return list(runs.values())


def commits_of(line: Line) -> str:
    return ", ".join(dict.fromkeys(commit_of(row.run) for row in line.rows))


def commit_of(run: Run) -> str:
    """The commit, or the date if a run did not write the commit down; with a mark if
    the run is of older code."""
    commit: str = run.origin["commit"] or run.origin["date"]
    return f"{commit} {OLD_MARK}" if is_old(run) else commit


def is_old(run: Run) -> bool:
    """Whether a run is of older code than the present."""
    return (run.origin["date"], run.origin.get("time", "")) < BEGIN_OF_PRESENT_CODE


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
    return f"{size / 2**30:.0f} GiB"


def mib(size: int | None) -> str:
    return "" if size is None else f"{size / 2**20:.0f} MiB"
