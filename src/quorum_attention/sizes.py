"""Bytes and seconds as people write them: "2GiB" in, "1.50 GiB" and "4 h 28 min" out."""

from __future__ import annotations

import math
import re
from itertools import pairwise

_UNITS = {
    "": 1,
    "b": 1,
    "k": 1024,
    "kib": 1024,
    "kb": 1000,
    "m": 1024**2,
    "mib": 1024**2,
    "mb": 1000**2,
    "g": 1024**3,
    "gib": 1024**3,
    "gb": 1000**3,
    "t": 1024**4,
    "tib": 1024**4,
    "tb": 1000**4,
}
_DURATIONS = (
    ("year", 365 * 86400.0),
    ("day", 86400.0),
    ("h", 3600.0),
    ("min", 60.0),
    ("s", 1.0),
)
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


def parse_bytes(value: int | str, name: str = "budget") -> int:
    """Bytes of ``value``: a whole number of bytes, or text such as "512MiB", "2 GiB", "1.5GB".

    Binary units (KiB, MiB, GiB, TiB; also K, M, G, T) are powers of 1024, decimal ones (KB, MB,
    GB, TB) powers of 1000; case does not matter.

    Raises:
        TypeError: ``value`` is neither an int nor a str.
        ValueError: it is negative or not of that form; ``name`` says which argument it was.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name} must be a number of bytes or text such as '2GiB', got {type(value).__name__}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        return value
    match = _PATTERN.fullmatch(value)
    if match is None or match[2].lower() not in _UNITS:
        raise ValueError(
            f"{name} must be a number of bytes or text such as '512MiB', '2GiB' or '1.5GB', "
            f"got {value!r}"
        )
    return int(float(match[1]) * _UNITS[match[2].lower()])


def format_bytes(n_bytes: int | float) -> str:
    """``n_bytes`` in the largest binary unit that keeps it at least one: "1.50 GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_seconds(seconds: float) -> str:
    """``seconds`` in the units that fit: "85.3 ms", "6.54 s", "3 min 20 s", "4 h 28 min",
    "67 days 6 h", "12 years 40 days"."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    for limit, factor, unit in ((0.9995e-3, 1e6, "us"), (0.9995, 1e3, "ms"), (99.95, 1.0, "s")):
        if seconds < limit:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    for (unit, size), (smaller, part) in pairwise(_DURATIONS):
        if seconds >= size - part / 2:
            whole, rest = divmod(round(seconds / part), round(size / part))
            return _count(whole, unit) + (f" {_count(rest, smaller)}" if rest else "")
    raise AssertionError("a minute and more has been dealt with")


def _count(number: int, unit: str) -> str:
    plural = "s" if unit in ("day", "year") and number != 1 else ""
    return f"{number:,} {unit}{plural}"
