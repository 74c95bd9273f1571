"""Architecture's house is the one that is built: every room is named, and none that is gone."""

from __future__ import annotations

import re
from pathlib import Path

from helpers_docs import ROOT

import quorum_attention

PACKAGE = Path(quorum_attention.__file__).parent
FILES = [
    path for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()
]
ROOMS = {path.stem for path in FILES if not path.stem.startswith("__")}


def test_the_house_on_one_page_has_every_room() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    house = page.split("## The house on one page")[1].split("```")[1]
    # Names stand at the beginning of a line, what they are for further right.
    lines = re.findall(r"^([a-z].*?)(?:  |$)", house, re.M)
    named = [name for line in lines for name in line.split(", ")]
    assert sorted(named) == sorted(ROOMS)
