"""The versions of Hugging Face Transformers that this integration was written for."""

from __future__ import annotations

import re
from importlib import metadata

# From 5.6 on masks are described by lengths and offsets; before, by a tensor of positions.
OLDEST, NEXT = (5, 6), (6, 0)
RANGE = "5.6 or later, before 6"
INSTALL = 'pip install "quorum-attention[transformers]"'


def check_version() -> None:
    """Nothing, or an error that says what is wrong and what to install.

    Raises:
        ImportError: Transformers is not installed, or is a version that this integration does
            not know.
    """
    try:
        found = metadata.version("transformers")
    except metadata.PackageNotFoundError:
        message = f"this needs Hugging Face Transformers ({RANGE}), which is not installed: "
        raise ImportError(message + INSTALL) from None
    numbers = re.match(r"(\d+)\.(\d+)", found)
    if numbers is None or not OLDEST <= (int(numbers[1]), int(numbers[2])) < NEXT:
        message = f"this needs Hugging Face Transformers {RANGE}; installed is {found}: {INSTALL}"
        raise ImportError(message)


__all__ = ["INSTALL", "RANGE", "check_version"]
