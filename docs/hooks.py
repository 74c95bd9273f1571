"""What `make docs` changes in a page: parts of the README where a page asks for one, and links to
files that are in the repository but not on the site."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
_PART = re.compile(r"<!-- of the README: (.+?) -->")
_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!images/)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, called by MkDocs for each."""
    depth = page.file.src_uri.count("/")
    return outside(_PART.sub(lambda match: part(match[1]), markdown)) if depth == 0 else markdown


def part(heading: str) -> str:
    """The text below ``heading`` of the README, with links as from docs/.

    Raises:
        ValueError: the README has no such heading.
    """
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    found = re.search(rf"^## {re.escape(heading)}\n(.*?)(?=^## |\Z)", readme, re.M | re.S)
    if found is None:
        raise ValueError(f"README.md has no heading {heading!r}")
    return re.sub(
        r"\]\(([^)\s]+)\)",
        lambda match: f"]({_from_docs(match[1])})",
        found[1].strip(),
    )


def _from_docs(target: str) -> str:
    if target.startswith(("http:", "https:", "#")):
        return target
    return target.removeprefix("docs/") if target.startswith("docs/") else f"../{target}"


def outside(markdown: str) -> str:
    """Links that leave docs/ as the name of the file: the site does not have it."""
    return _OUTSIDE.sub(lambda m: m[1] if "`" in m[1] else f"{m[1]} (`{m[2]}`)", markdown)
