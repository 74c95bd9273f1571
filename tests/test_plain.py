"""What holds for the text of the whole package and its tests."""

from __future__ import annotations

from pathlib import Path


def test_the_list_of_slow_tests_names_tests_that_there_are() -> None:
    """Of tests/slow.txt; a test that is renamed or gone takes its line with it."""
    tests, gone = Path(__file__).parent, []
    file = ""
    for line in (tests / "slow.txt").read_text(encoding="utf-8").splitlines():
        if line.startswith(" "):
            name = line.strip().removesuffix("[*]").split("::")[-1]
            here = (tests / file).exists()
            if not here or f"def {name}(" not in (tests / file).read_text(encoding="utf-8"):
                gone.append(f"{file}::{name}")
        elif line and not line.startswith("#"):
            file = line
    assert not gone
