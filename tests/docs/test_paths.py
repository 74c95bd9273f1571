"""The pages for those who change the code name files that exist."""

from __future__ import annotations

import re

import pytest
from helpers.docs import ROOT

PACKAGE = ROOT / "src" / "quorum_attention"
# Names in backticks that end like a file of this repository.
PATH = re.compile(r"`([\w./-]+\.(?:py|md|txt|toml))`")


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md", "planner.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    """A name stands for a file of the package, of the repository, or beside one named
    before."""
    missing = []
    folder = PACKAGE
    for name in PATH.findall((ROOT / "docs" / page).read_text(encoding="utf-8")):
        if name.endswith("NAME.py"):
            continue
        places = [PACKAGE / name, ROOT / name, folder / name]
        existing = [place for place in places if place.exists()]
        if existing:
            folder = existing[0].parent
        else:
            missing.append(name)
    assert not missing


def test_the_table_of_changes_names_what_is_there() -> None:
    """Each name of a row is defined in a file of the row."""
    page = (ROOT / "docs" / "contributing.md").read_text(encoding="utf-8")
    table = page.partition("## Where to change what")[2]
    rows = [
        line.split("|")[2:4] for line in table.splitlines() if line.startswith("| ")
    ][1:]
    assert len(rows) > 20
    missing = []
    for names, files in rows:
        texts = [
            (PACKAGE / file).read_text(encoding="utf-8") for file in PATH.findall(files)
        ]
        for name in re.findall(r"`(\w+)`", names):
            definition = re.compile(rf"^(def |class )?{name}\b( =|:|\()", re.M)
            if not any(definition.search(text) for text in texts):
                missing.append(f"{name} in {files.strip()}")
    assert not missing
