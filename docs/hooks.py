"""What `make docs` changes in a page: links to files that are not on the site."""

from __future__ import annotations

import re
from typing import Any

_OUTSIDE = re.compile(r"\[([^\]]+)\]\(\.\./(?!images/)([^)\s]+)\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """The text of a page, called by MkDocs for each."""
    return outside(markdown) if page.file.src_uri.count("/") == 0 else markdown


def outside(markdown: str) -> str:
    """Links that leave docs/ as the name of the file: the site does not have it."""
    return _OUTSIDE.sub(
        lambda m: m[1] if "`" in m[1] else f"{m[1]} (`{m[2]}`)", markdown
    )
