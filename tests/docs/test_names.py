"""Files that the documentation names are there, and links lead somewhere."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_docs import PAGES, ROOT

FOLDERS = ("src", "tests", "docs", "benchmarks", "examples")
TEXTS = (*PAGES, *sorted((ROOT / "src").rglob("*.py")))
FILES = {
    str(path.relative_to(ROOT)) for folder in FOLDERS for path in (ROOT / folder).rglob("*.*")
} | {path.name for path in ROOT.iterdir()}
# A name for a name that the reader chooses.
PLACEHOLDER = "NAME"
_NAMED = re.compile(r"[\w./-]*\w\.py\b")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def missing(text: str) -> list[str]:
    """Names of files of ours in ``text`` that no file ends with."""
    names = {name.lstrip("./") for name in _NAMED.findall(text) if PLACEHOLDER not in name}
    return sorted(
        name for name in names if not any(f"/{file}".endswith(f"/{name}") for file in FILES)
    )


def anchors(page: Path) -> set[str]:
    """What headings of a page are linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", TEXTS, ids=[str(path.relative_to(ROOT)) for path in TEXTS])
def test_files_that_are_named_exist(path: Path) -> None:
    assert not missing(path.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", PAGES, ids=[page.name for page in PAGES])
def test_links_lead_somewhere(page: Path) -> None:
    for target, anchor in _LINK.findall(page.read_text(encoding="utf-8")):
        if target.startswith(("http:", "https:")):
            continue
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), target
        assert not anchor or anchor in anchors(there), f"{target}#{anchor}"


SCRIPT = ROOT / "benchmarks" / "tables.py"


def test_the_script_runs_as_it_says() -> None:
    """And the page and README are up to date."""
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--check"], capture_output=True, text=True, check=False,
        env={"PYTHONPATH": str(ROOT / "src"), "PATH": ""},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_every_raw_file_is_read_or_linked() -> None:
    pages = [*(ROOT / "docs").glob("*.md"), SCRIPT, ROOT / "README.md"]
    text = "".join(page.read_text(encoding="utf-8") for page in pages)
    for file in (ROOT / "benchmarks" / "results").iterdir():
        assert file.name in text or file.name.endswith("-random-calls.json"), file.name
