"""Optional packages: how to install what a feature needs."""

from __future__ import annotations


def install_hint(extra: str) -> str:
    """How to install an extra, for error messages. No index has this package."""
    return f'in a checkout of Quorum Attention, run pip install ".[{extra}]"'
