"""The pages for those who change the code name files that exist."""

from __future__ import annotations

import re

import pytest
from helpers_docs import ROOT

PACKAGE = ROOT / "src" / "quorum_attention"
# Names in backticks that end like a file of this repository.
PATH = re.compile(r"`([\w./-]+\.(?:py|md|txt|toml))`")


@pytest.mark.parametrize("page", ["architecture.md", "contributing.md", "planner.md"])
def test_every_file_that_a_page_names_exists(page: str) -> None:
    """A name stands for a file of the package, of the repository, or beside one named before."""
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
