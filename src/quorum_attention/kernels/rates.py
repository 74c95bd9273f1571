"""Rates of kernels, by head dimension."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise


def by_head_dim(table: Mapping[int, tuple[float, float]], head_dim: int) -> tuple[float, float]:
    """The (forward, backward) rates of ``table`` for ``head_dim``, interpolated linearly between
    its entries; beyond them, those of the nearest entry."""
    known = sorted(table)
    for low, high in pairwise(known):
        if low <= head_dim <= high:
            part = (head_dim - low) / (high - low)
            (a, b), (c, d) = table[low], table[high]
            return a + part * (c - a), b + part * (d - b)
    return table[known[0] if head_dim < known[0] else known[-1]]
