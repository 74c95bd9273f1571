"""The package's files and their syntax trees, for tests that read its code."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import quorum_attention

PACKAGE = Path(quorum_attention.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))


@cache
def syntax_tree(path: Path) -> ast.Module:
    """Return the tree of a file. It is kept: to parse all files takes a second, and
    several tests read them."""
    return ast.parse(path.read_text(encoding="utf-8"))
