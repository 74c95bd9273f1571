"""The files of runs (``quorum_attention.bench.record``): their names, and what tables
read of them."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

RESULTS = Path(__file__).parent / "results"
# Date and time of day. Runs before it are of older code.
BEGIN_OF_PRESENT_CODE = ("2026-11-29", "12:00")
# Date, machine and case, commit, and a number where a day has several runs of them.
FILE_NAME = re.compile(r"(\d{4}-\d\d-\d\d)-(.+?)-([0-9a-f]{7,}|unknown)(-\d+)?\.json")


def new_path(folder: Path, name: str, run: Mapping[str, Any]) -> Path:
    """A path that no file has: the date, ``name`` and the commit, and a number if
    others have these.
    """
    commit = run["commit"] or "unknown"
    stem = f"{run['date']}-{name}-{commit}"
    path = folder / f"{stem}.json"
    numbers = itertools.count(2)
    while path.exists():
        path = folder / f"{stem}-{next(numbers)}.json"
    return path


class Run(NamedTuple):
    """A run.

    Attributes:
        file: name of its file.
        origin: command, commit, machine, versions and date.
        rows: the measurements by name.
    """

    file: str
    origin: dict[str, Any]
    rows: dict[str, Any]

    @property
    def moment(self) -> tuple[str, str]:
        """The date and the time of day. Old runs did not write down the time."""
        return self.origin["date"], self.origin.get("time", "")

    @property
    def is_old(self) -> bool:
        """Whether the run is of older code than the present."""
        return self.moment < BEGIN_OF_PRESENT_CODE


class Row(NamedTuple):
    """A measurement, and the run that it is of."""

    value: Any
    run: Run


def read_runs(name: str) -> list[Run]:
    """The runs of a machine and case, such as "h200-plain", the oldest first."""
    return sorted(_runs_of(name), key=lambda run: run.moment)


def _runs_of(name: str) -> Iterator[Run]:
    for path in sorted(RESULTS.iterdir()):
        match = FILE_NAME.fullmatch(path.name)
        if match is None or match[2] != name:
            continue
        content = json.loads(path.read_text("utf-8"))
        yield Run(path.name, content["run"], content["rows"])


def newest_rows(name: str, *methods: str) -> dict[str, Row]:
    """The newest measurement of each row.

    Args:
        name: the machine and case.
        methods: that a row must have measured; rows without them are left out.
    """
    rows: dict[str, Row] = {}
    for run in read_runs(name):
        for row_name, value in run.rows.items():
            if all(method in value for method in methods):
                rows[row_name] = Row(value, run)
    return rows


def present_rows(name: str, *methods: str) -> dict[str, Row]:
    """The rows of ``newest_rows`` that were measured on the present code."""
    rows = newest_rows(name, *methods)
    return {row_name: row for row_name, row in rows.items() if not row.run.is_old}
