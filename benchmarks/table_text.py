"""Tables as text: lines with the runs that they show, and where these come from."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any, NamedTuple

from runs import Row, Run

Seconds = tuple[float, float]
"""Of a forward; of a forward and its backward."""


class Line(NamedTuple):
    """A line of a table, and the measurements that it shows: none for figures of the
    paper."""

    cells: list[str]
    rows: Sequence[Row] = ()


def section(columns: Sequence[str], lines: Sequence[Line]) -> str:
    """Where the figures come from, and the table. Lines name their commits where these
    differ."""
    runs = runs_of(lines)
    commits = {commit_of(run) for run in runs}
    if len(commits) > 1:
        columns = [*columns, "commit"]
        lines = [Line([*line.cells, commits_of(line)]) for line in lines]
    return f"{describe_runs(runs)}.\n\n{table(columns, [line.cells for line in lines])}"


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
    return run.origin["commit"] or "unknown"


def describe_runs(runs: Iterable[Run]) -> str:
    """Machine and versions, and of each run the date, the commit, the command and the
    raw file."""
    by_machine: dict[str, list[str]] = {}
    for run in runs:
        texts = by_machine.setdefault(describe_machine(run), [])
        texts.append(describe_run(run))
    parts = [f"{machine}: {'; '.join(texts)}" for machine, texts in by_machine.items()]
    return "; ".join(parts)


def describe_machine(run: Run) -> str:
    versions = run.origin["versions"]
    cudnn = f", cuDNN {versions['cudnn']}" if "cudnn" in versions else ""
    return f"{run.origin['machine']}, torch {versions['torch']}{cudnn}"


def describe_run(run: Run) -> str:
    origin = run.origin
    words = [origin["date"]]
    if origin["commit"]:
        words.append(f"commit {origin['commit']}")
    if origin.get("is_clean") is False:
        words.append("with changes")
    if "before" in origin:
        words.append(f"before: {origin['before']}")
    if "note" in origin:
        words.append(origin["note"])
    words += [f"`{origin['command']}`", f"[raw](../benchmarks/results/{run.file})"]
    return ", ".join(words)


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
