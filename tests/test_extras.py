"""Hints how to install something work: no index has this package."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from helpers.docs import PAGES, ROOT
from helpers.sources import SOURCES

from quorum_attention.extras import install_hint
from quorum_attention.pictures import check_drawable

TEXTS = [
    *SOURCES, *PAGES, ROOT / "Makefile", *(ROOT / "examples").glob("*.*"),
    *(ROOT / "benchmarks").glob("*.py"),
]  # fmt: skip
EXTRAS = set(re.findall(r"^(\w+) = \[", (ROOT / "pyproject.toml").read_text(), re.M))


def test_nothing_says_to_install_it_from_an_index() -> None:
    wrong = []
    for path in TEXTS:
        text = path.read_text(encoding="utf-8")
        if re.search(r"pip install[^\n`]*quorum-attention\b", text):
            wrong.append(f"{path}: from an index")
        if path in SOURCES and path.name != "extras.py" and "pip install" in text:
            wrong.append(f"{path}: extras.install_hint says it")
        for extra in re.findall(
            r"install_hint\(['\"](\w+)['\"]\)|pip install \\?\"\.\[(\w+)\]", text
        ):
            if not set(extra) - {""} <= EXTRAS:
                wrong.append(f"{path}: no extra {extra}")
    assert not wrong


def test_a_picture_without_matplotlib(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=re.escape(install_hint("draw"))):
        check_drawable(tmp_path / "a.png")
