"""The tables of results are what the files of figures say."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
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


@pytest.mark.parametrize(("page", "figure"), [("README", "0.86; 0.92"), ("PAGE", "3.64e-04")])
def test_a_figure_typed_by_hand_fails(
    page: str, figure: str, tables: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(tables, page).read_text(encoding="utf-8")
    if figure not in right:  # measured anew
        figure = next(word for word in right.split() if word.startswith("0."))
    typed = tmp_path / "page.md"
    typed.write_text(right.replace(figure, "0.01", 1))
    monkeypatch.setattr(tables, page, typed)
    monkeypatch.setattr(sys, "argv", ["tables.py", "--check"])
    with pytest.raises(SystemExit, match="out of date"):
        tables.main()
    assert "0.01" in typed.read_text()


def test_the_papers_figures_are_all_on_the_page(tables: ModuleType) -> None:
    page = tables.page()
    for error in ("2.689e-04", "1.356e-03", "2.980e-03"):
        assert error in page
    assert "| 84, 0.36 |" in page
    assert "38.8 / 58.9 / 2.3" in page


def test_every_raw_file_is_read_or_linked(tables: ModuleType) -> None:
    pages = [*(ROOT / "docs").glob("*.md"), SCRIPT, ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for file in tables.RESULTS.iterdir():
        assert file.name in text or file.name.endswith("-random-calls.json"), file.name
