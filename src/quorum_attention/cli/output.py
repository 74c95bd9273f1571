"""What commands print."""

from __future__ import annotations

import json
from typing import Any

from rich.console import Console


def console() -> Console:
    """Text for people, on stdout; wide enough for a table where it is not a terminal."""
    # What is printed is data (paths, names of extras, messages): [x] and :x: are not markup.
    found = Console(markup=False, emoji=False)
    return found if found.is_terminal else Console(width=132, markup=False, emoji=False)


def print_json(result: dict[str, Any]) -> None:
    """JSON for machines, on stdout."""
    print(json.dumps(result, indent=1, default=str))
