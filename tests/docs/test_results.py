"""The page of results is what the files of figures say, and its script reads them right."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from helpers_docs import ROOT

SCRIPT = ROOT / "benchmarks" / "tables.py"


@pytest.fixture
def tables() -> ModuleType:
    spec = importlib.util.spec_from_file_location("tables", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date(tables: ModuleType) -> None:
    written = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert tables.page() == written, "python benchmarks/tables.py"


def test_a_page_that_is_not_fails(tables: ModuleType, tmp_path: Path, monkeypatch) -> None:
    stale = tmp_path / "docs" / "results.md"
    stale.parent.mkdir()
    stale.write_text("old")
    monkeypatch.setattr(tables, "PAGE", stale)
    monkeypatch.setattr(tables, "ROOT", tmp_path)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        tables.main()
    assert stale.read_text() == "old"


def test_the_papers_figures_are_all_on_the_page(tables: ModuleType) -> None:
    page = tables.page()
    for error in ("2.689e-04", "1.356e-03", "2.980e-03"):
        assert error in page
    assert "| 84, 0.36 |" in page
    assert "15847, 70.4" in page
    assert "38.8 / 58.9 / 2.3" in page


def measurement(method: str, **more: Any) -> dict[str, Any]:
    spec = {
        "method": method,
        "tokens": 65536,
        "dtype": "float16",
        "backward": True,
        "itself": False,
    }
    answer = {
        "status": "ok", "forward_seconds": [0.2, 0.1, 0.3], "backward_seconds": [0.4],
        "peak_bytes": 100, "input_bytes": 28, "errors": {}, "differences": {},
    }  # fmt: skip
    for name, value in more.items():
        (spec if name in spec else answer)[name] = value
    return {"spec": spec, "answer": answer}


def written(folder: Path, name: str, measurements: list[dict[str, Any]]) -> None:
    about = {"device": "a GPU", "torch": "2", "date": "today"}
    text = json.dumps({"about": about, "measurements": measurements})
    (folder / name).write_text(text)


def test_files_of_bench_are_read(tables: ModuleType, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert "not measured yet" in tables.accuracy()
    assert "not measured yet" in tables.wrapped()
    errors = {"out": [1e-4, 3e-4], "grad_query": [1e-3], "grad_key": [2e-3], "grad_value": [3e-3]}
    written(tmp_path, "h200-bench-accuracy.json", [measurement("quorum", errors=errors)])
    assert "| here: ours, as planned | 2.000e-04 | - | 2.000e-03 | - |" in tables.accuracy()
    times = [
        measurement("flash"), measurement("quorum", backward_seconds=[0.1], peak_bytes=36),
        measurement("cudnn", status="oom"),
    ]  # fmt: skip
    written(tmp_path, "h200-bench-cost.json", times)
    assert "| 65,536 | forward+backward | 600 | 300: 0.5x, 0.50x memory | oom |" in tables.cost()
    apart = {"out": [[1, 0]], "dQ": [[1e-9, 0], [3e-9, 0]], "dK": [[2e-9, 0]], "dV": [[4e-6, 0]]}
    measured = measurement("LongNet", itself=True, dtype="float32", differences=apart)
    written(tmp_path, "h200-bench-wrapped.json", [measured])
    line = "| longnet float32 | 1.3e-09 | 5.4e-09 | 3.2e-06 | 3.0e-09 | 2.0e-09 | 4.0e-06 |"
    assert line in tables.wrapped()


def test_the_script_runs_as_it_says() -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
