"""Links lead somewhere, and tables are up to date."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from helpers_docs import PAGES, ROOT

_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(page: Path) -> set[str]:
    """What headings of a page are linked by."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.M)
    return {re.sub(r"[^\w -]", "", heading).lower().replace(" ", "-") for heading in headings}


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
