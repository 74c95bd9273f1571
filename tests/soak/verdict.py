"""Whether what a process holds grew, and whether anything was left."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import Any

MIB = 1 << 20
# How much each may grow over the second half of a soak: the slope through the rows, times the time.
# A leak of 1 KB a call is 20 MiB and more in the half hour of an hour's soak. Below these are what
# torch's allocators, its compiler's caches and glibc's free lists do by themselves (__main__.py
# keeps two of them small: oneDNN's cache of shapes, and glibc's arenas of threads).
LIMITS = {
    "rss": 64 * MIB, "anonymous": 48 * MIB, "device_allocated": 4 * MIB,
    "device_reserved": 256 * MIB, "page_locked": 16 * MIB, "pinned": 64 * MIB, "descriptors": 4,
    "threads": 4, "children": 1, "children_anonymous": 96 * MIB, "shared_files": 1,
    "temporary_files": 4, "temporary_bytes": 4 * MIB,
}  # fmt: skip
# How much may be there at the end, pools closed, beyond what was there after the warm-up.
LEFT = {
    "device_allocated": MIB, "page_locked": 0, "descriptors": 4, "threads": 4, "children": 0,
    "shared_files": 0, "temporary_files": 0,
}  # fmt: skip


def slope(times: Sequence[float], values: Sequence[float]) -> float:
    """The median slope through all pairs of rows (Theil and Sen): a few rows that jump move it
    little."""
    found = [
        (values[j] - values[i]) / (times[j] - times[i])
        for i, j in combinations(range(len(times)), 2)
        if times[j] > times[i]
    ]
    return median(found) if found else 0.0


def growth(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """By name, how much of it was added in the second half of the time."""
    half = rows[len(rows) // 2 :]
    if len(half) < 2:
        return {}
    times = [row["seconds"] for row in half]
    lasted = times[-1] - times[0]
    return {name: slope(times, [row[name] for row in half]) * lasted for name in LIMITS}


def complaints(
    rows: Sequence[dict[str, Any]], began: dict[str, Any], ended: dict[str, Any]
) -> list[str]:
    """What grew and what was left, in words; none is as it should be."""
    found = [
        f"{name} grew by {added:,.0f} in the second half, where {LIMITS[name]:,} is allowed"
        for name, added in growth(rows).items()
        if added > LIMITS[name]
    ]
    return found + [
        f"{name}: {ended[name]:,} at the end, {began[name]:,} after the warm-up"
        for name, more in LEFT.items()
        if ended[name] > began[name] + more
    ]
