"""Bytes as people write them: "2GiB" in, "1.50 GiB" out."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

from quorum_attention.counts import shown, whole_number

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
_PATTERN = re.compile(r"\s*([0-9]*\.?[0-9]+)\s*([a-zA-Z]*)\s*")


# More than any machine has; what a tensor can be counted in.
_MOST_BYTES = 2**63 - 1


def parse_bytes(value: Any, name: str = "budget") -> int:
    """Bytes of ``value``: a whole number of bytes, or text such as "512MiB", "2 GiB", "1.5GB".

    Binary units (KiB, MiB, GiB, TiB; also K, M, G, T) are powers of 1024, decimal ones (KB, MB,
    GB, TB) powers of 1000; case does not matter.

    Raises:
        TypeError: ``value`` is neither an integer (Python's or NumPy's) nor a str.
        ValueError: it is negative, 2**63 or more, or not of that form; ``name`` says which
            argument it was.
    """
    if isinstance(value, str):
        match = _PATTERN.fullmatch(value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(
                f"{name} must be a number of bytes or text such as '512MiB', '2GiB' or '1.5GB', "
                f"got {shown(value)}"
            )
        # Nothing that long fits, and Python refuses to read thousands of digits.
        short = len(match[1]) <= 40
        n_bytes = int(Fraction(match[1]) * _UNITS[match[2].lower()]) if short else _MOST_BYTES + 1
    else:
        try:
            n_bytes = whole_number(value, name, -_MOST_BYTES)
        except TypeError:
            raise TypeError(
                f"{name} must be a number of bytes or text such as '2GiB', "
                f"got {type(value).__name__}"
            ) from None
    if n_bytes < 0:
        raise ValueError(f"{name} must not be negative, got {n_bytes}")
    if n_bytes > _MOST_BYTES:
        raise ValueError(f"{name} must be less than 2**63 bytes, got {shown(value)}")
    return n_bytes


def format_bytes(n_bytes: int | float) -> str:
    """``n_bytes`` in the largest binary unit that keeps it at least one: "1.50 GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
