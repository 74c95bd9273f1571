"""The tables of results are what the files of figures say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from types import ModuleType

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


def test_the_script_runs_as_it_says() -> None:
    """And the page and README are up to date."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_raw_file_is_read_or_linked(tables: ModuleType) -> None:
    pages = [*(ROOT / "docs").glob("*.md"), SCRIPT, ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for file in tables.RESULTS.iterdir():
        assert file.name in text or file.name.endswith("-random-calls.json"), file.name
