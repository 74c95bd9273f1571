"""Hints how to install something work: no index has this package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.docs import PAGES, ROOT

import quorum_attention
from quorum_attention.extras import install_hint
from quorum_attention.pictures import check_drawable

SOURCES = sorted(Path(quorum_attention.__file__).parent.rglob("*.py"))
TEXTS = [
    *SOURCES, *PAGES, ROOT / "Makefile", *(ROOT / "examples").glob("*.*"),
    *(ROOT / "benchmarks").glob("*.py"),
]  # fmt: skip
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_nothing_says_to_install_it_from_an_index(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"pip install[^\n`]*quorum-attention\b", text)
    if path in SOURCES and path.name != "extras.py":
        assert "pip install" not in text, "extras.install_hint says it"
    for extra in re.findall(
        r"install_hint\(['\"](\w+)['\"]\)|pip install \\?\"\.\[(\w+)\]", text
    ):
        assert set(extra) - {""} <= EXTRAS


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape(install_hint("draw"))):
        check_drawable(tmp_path / "a.png")
