"""The record of a run: it says where its rows come from, and no run changes another's
file."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch
from helpers.docs import ROOT

from quorum_attention.bench import record
from quorum_attention.bench.record import RunRecord, describe_run

sys.path.insert(0, str(ROOT / "benchmarks"))
import runs


def test_a_run_has_a_file_of_its_own(tmp_path: Path) -> None:
    run = describe_run("a command", {"tokens": 3, "folder": tmp_path}, "cpu")
    for number in range(3):
        RunRecord(runs.new_path(tmp_path, "cpu-case", run), run).add(
            {"row": {"torch": number}}
        )
    stem = f"{run['date']}-cpu-case-{run['commit'] or 'unknown'}"
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {f"{stem}.json", f"{stem}-2.json", f"{stem}-3.json"}
    content = json.loads((tmp_path / f"{stem}-2.json").read_text())
    assert content == {"run": run, "rows": {"row": {"torch": 1}}}
    assert run["arguments"] == {"tokens": 3, "folder": str(tmp_path)}
    assert run["versions"]["torch"] == torch.__version__


def test_a_commit_is_gits_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed package may lie within another project's repository: its commit is
    not ours."""
    monkeypatch.setattr(
        record.quorum_attention, "__file__", "/usr/lib/nothing/__init__.py"
    )
    run = describe_run("a command", {}, "cpu")
    assert (run["commit"], run["is_clean"]) == (None, None)


def test_a_table_shows_the_newest_run_of_each_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runs, "RESULTS", tmp_path)
    dates = {"2026-01-02": "aaaaaaa", "2026-01-01": "bbbbbbb", "2026-01-03": "unknown"}
    rows = {
        "2026-01-01": {"short": {"torch": 1}, "long": {"torch": 1, "fa4": 1}},
        "2026-01-02": {"short": {"torch": 2}, "long": {"torch": 2}},
        "2026-01-03": {},
    }
    for date, commit in dates.items():
        origin = {"date": date, "commit": commit}
        content = {"run": origin, "rows": rows[date]}
        (tmp_path / f"{date}-cpu-case-{commit}.json").write_text(json.dumps(content))
    newest = runs.newest_rows("cpu-case")
    assert {name: row.value["torch"] for name, row in newest.items()} == {
        "short": 2,
        "long": 2,
    }
    assert newest["long"].run.origin["commit"] == "aaaaaaa"
    beside_fa4 = runs.newest_rows("cpu-case", "fa4")
    assert list(beside_fa4) == ["long"]
    assert beside_fa4["long"].run.origin["commit"] == "bbbbbbb"


def test_raw_files_are_named_after_where_they_come_from() -> None:
    for path in runs.RESULTS.iterdir():
        match = runs.FILE_NAME.fullmatch(path.name)
        if match is None:
            continue
        origin = json.loads(path.read_text())["run"]
        assert match[1] == origin["date"]
        assert match[3] == (origin["commit"] or "unknown")
        assert {"command", "machine", "versions"} <= set(origin)
