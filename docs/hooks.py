"""What `make docs` changes in a page: links to files that are not on the site,
and the page's place in a search."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!images/)([^)\s]+)\)")
# Guides come first in a search, and pages for developers last. A search leaves
# figures of older code out.
_GUIDES = ("long-context", "long-prompts", "masks", "devices", "files", "kit")
_DEVELOPING = (
    "architecture",
    "contributing",
    "native",
    "planner",
    "random-calls",
)
_LEFT_OUT = "older-results"
_FIRST = 3
_LAST = 0.3


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, called by MkDocs for each."""
    name = page.file.src_uri.removesuffix(".md")
    if name in _GUIDES:
        page.meta["search"] = {"boost": _FIRST}
    elif name in _DEVELOPING:
        page.meta["search"] = {"boost": _LAST}
    elif name == _LEFT_OUT:
        page.meta["search"] = {"exclude": True}
    return outside(markdown) if "/" not in name else markdown


def outside(markdown: str) -> str:
    """Links that leave docs/ as the file's name: the site does not have it."""
    return _OUTSIDE.sub(
        lambda m: m[1] if "`" in m[1] else f"{m[1]} (`{m[2]}`)", markdown
    )
