"""Division of whole numbers that rounds up."""

from __future__ import annotations


def ceil_div(n: int, size: int) -> int:
    """Return how many parts of ``size`` hold ``n``."""
    return -(-n // size)


def round_up(n: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``n``."""
    return ceil_div(n, unit) * unit
