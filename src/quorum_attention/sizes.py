"""Bytes and counts as people write them: "2GiB" and "1M" in, "1.50 GiB" out."""

from __future__ import annotations

import re
from fractions import Fraction

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
# Of things that are counted, not measured in bytes, a suffix is a power of 1024 as well.
_COUNTS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
# An exponent of three digits already has no meaning, and longer ones would take all memory.
_PATTERN = re.compile(
    r"\s*(?P<number>([0-9]+\.?[0-9]*|\.[0-9]+)(e[+-]?[0-9]{1,2})?)\s*(?P<unit>[a-z]*)\s*",
    re.IGNORECASE,
)
_LONGEST = 40  # digits of a number that is read, and characters of a text that is shown
_LARGEST = 1 << 63  # more than any machine has


def parse_bytes(value: int | str, name: str = "budget") -> int:
    """Bytes of ``value``: a whole number of bytes, or text such as "512MiB", "2 GiB", "1.5GB",
    "1e9".

    Binary units (KiB, MiB, GiB, TiB; also K, M, G, T) are powers of 1024, decimal ones (KB, MB,
    GB, TB) powers of 1000; case does not matter. A fraction of a byte is dropped.

    Raises:
        TypeError: ``value`` is neither an int nor a str.
        ValueError: it is negative, not of that form, or beyond 64 bits; ``name`` says which
            argument it was.
    """
    if isinstance(value, bool) or not isinstance(value, (int, str)):
        raise TypeError(
            f"{name} must be a number of bytes or text such as '2GiB', got {type(value).__name__}"
        )
    if isinstance(value, int):
        if value < 0:
            raise ValueError(f"{name} must not be negative, got {value}")
        found: Fraction | int | None = value
    else:
        found = _parsed(value, _UNITS)
    if found is None:
        raise ValueError(
            f"{name} must be a number of bytes or text such as '512MiB', '2GiB', '1.5GB' or "
            f"'1e9', got {_shortened(value)}"
        )
    if found >= _LARGEST:
        raise ValueError(f"{name} must be less than 2**63 bytes, got {_shortened(value)}")
    return int(found)


def parse_count(text: str) -> int:
    """A positive whole number from text: "1048576", "1_048_576", "1,048,576", "1e6", "128K", "1M".

    K, M and G are powers of 1024, as sequence lengths usually are: "1M" is 1,048,576, and a
    million is "1e6".

    Raises:
        ValueError: it is not of that form, not whole, below 1 or beyond 64 bits.
    """
    found = _parsed(text.replace(",", "").replace("_", ""), _COUNTS)
    if found is None or found.denominator != 1:
        raise ValueError(
            f"must be a whole number such as 1048576, 1,048,576, 1e6, 128K or 1M "
            f"(1M is 1,048,576), got {_shortened(text)}"
        )
    if not 1 <= found < _LARGEST:
        raise ValueError(f"must be at least 1 and less than 2**63, got {_shortened(text)}")
    return int(found)


def _parsed(text: str, units: dict[str, int]) -> Fraction | None:
    """``text`` as an exact number, None where it is none; ``_LARGEST`` where it has so many digits
    that Python may refuse to read it."""
    match = _PATTERN.fullmatch(text)
    if match is None or match["unit"].lower() not in units:
        return None
    if len(match["number"]) > _LONGEST:
        return Fraction(_LARGEST)
    return Fraction(match["number"]) * units[match["unit"].lower()]


def _shortened(value: int | str) -> str:
    if isinstance(value, int):
        return f"a number of {value.bit_length()} bits"
    return repr(value if len(value) <= _LONGEST else f"{value[:_LONGEST]}...")


def format_bytes(n_bytes: int | float) -> str:
    """``n_bytes`` in the largest binary unit that keeps it at least one: "1.50 GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"
