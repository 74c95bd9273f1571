"""Whole numbers: division that rounds up, powers of two, the last one that fits."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable


def ceil_div(n: int, size: int) -> int:
    """Return how many parts of ``size`` hold ``n``."""
    return -(-n // size)


def round_up(n: int, unit: int) -> int:
    """Return the least multiple of ``unit`` that is not below ``n``."""
    return ceil_div(n, unit) * unit


def even_part(n: int, limit: int) -> int:
    """Return the size of the largest of as few equal parts of ``n`` as ``limit``
    allows."""
    return ceil_div(n, ceil_div(n, limit))


def power_of_two_from(n: int) -> int:
    """Return the least power of two that is not below ``n``, which is at least 1."""
    return 1 << (n - 1).bit_length()


def last_fitting(limit: int, fits: Callable[[int], bool]) -> int:
    """The largest number from 1 to ``limit`` that fits, where all smaller ones do; 0 if
    1 does not."""
    numbers = range(1, limit + 1)
    return bisect_left(numbers, True, key=lambda number: not fits(number))
