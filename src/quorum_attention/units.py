"""Bytes, counts and seconds as text: reads "2GiB" and "1M", writes "1.50 GiB" and "4 h
28 min"."""

from __future__ import annotations

import math
import re
from fractions import Fraction
from typing import Any

from quorum_attention.argument_checks import shown, whole_number

_UNITS = {"": 1, "b": 1} | {
    letter + end: base**power
    for power, letter in enumerate("kmgt", start=1)
    for end, base in (("", 1024), ("ib", 1024), ("b", 1000))
}
# Suffixes of counts: powers of 1024 too.
_COUNTS = {"": 1, "k": 1024, "m": 1024**2, "g": 1024**3}
# More digits make no sense here; Python refuses thousands, and exponents could take all
# memory.
_PATTERN = re.compile(
    r"\s*(?P<number>([0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})(e[+-]?[0-9]{1,2})?)\s*"
    r"(?P<unit>[a-z]*)\s*",
    re.IGNORECASE,
)
# More than any machine has: torch counts elements in 64 bits.
_LIMIT = 2**63
_LARGEST_ERROR = 1e6
# Fewer bytes of a machine's memory are a slip: 16 for "16GiB", and 24576 for MiB.
_LEAST_MEMORY = 1 << 20
_LEAST_BUDGET = 1 << 10


def parse_bytes(value: Any, name: str = "budget") -> int:
    """Return the bytes of ``value``.

    The value is a whole number of bytes (1e9 is one), or text such as "512MiB", "2
    GiB", "1.5GB", "1e9".

    Binary units (KiB, MiB, GiB, TiB; also K, M, G, T) are powers of 1024, decimal ones
    (KB, MB, GB, TB) powers of 1000; case does not matter. A fraction of a byte is
    dropped.

    Raises:
        TypeError: ``value`` is neither a whole number (Python's or NumPy's) nor a str.
        ValueError: it is negative, 2**63 or more, or not of that form; ``name`` says
            which argument it was.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    number = _parsed(value, _UNITS) if isinstance(value, str) else value
    try:
        n_bytes = int(number) if isinstance(number, Fraction) else number
        return whole_number(n_bytes, name, 0, _LIMIT - 1)
    except TypeError:
        kind = ValueError if isinstance(value, str) else TypeError
        raise kind(
            f"{name} must be a whole number of bytes or text such as '512MiB', '2GiB', "
            f"'1.5GB' or '1e9', got {shown(value)}"
        ) from None


def parse_memory(
    value: Any, name: str, *, lowest: int = _LEAST_MEMORY, or_zero: bool = False
) -> int:
    """Return the bytes of ``value``, which are memory of a device or a host that a
    model, or its cache, may take.

    Args:
        value: as in ``parse_bytes``.
        name: of the argument.
        lowest: bytes below which a number is a slip.
        or_zero: whether 0 is allowed.

    Raises:
        TypeError, ValueError: as in ``parse_bytes``; or it is a slip, such as 16 for
            "16GiB".
    """
    n_bytes = parse_bytes(value, name)
    if n_bytes >= lowest or (or_zero and n_bytes == 0):
        return n_bytes
    raise ValueError(
        f"{name} must be at least {format_bytes(lowest)}, in bytes or as text such as "
        f"'16GiB', got {shown(value)}, which is {counted(n_bytes, 'byte')}"
    )


def check_budget(budget: Any) -> None:
    """Refuse a budget of calls that are made later, if it is a slip: those calls would
    fail, or never be made.

    Args:
        budget: as in ``parse_bytes``; None is none.

    Raises:
        TypeError, ValueError: as in ``parse_memory``.
    """
    if budget is not None:
        parse_memory(budget, "budget", lowest=_LEAST_BUDGET)


def parse_count(text: str) -> int:
    """Return a positive whole number from text: "1048576", "1,048,576", "1e6", "128K",
    "1M".

    K, M and G are powers of 1024, as sequence lengths usually are: "1M" is 1,048,576,
    and a million is "1e6".

    Raises:
        ValueError: it is not of that form, not whole, below 1 or 2**63 or more.
    """
    number = _parsed(text.replace(",", "").replace("_", ""), _COUNTS)
    if number is None or number.denominator != 1 or not 1 <= number < _LIMIT:
        raise ValueError(
            "must be a whole number, at least 1 and less than 2**63, such as 1048576, "
            f"1,048,576, 1e6, 128K or 1M (1M is 1,048,576), got {shown(text)}"
        )
    return int(number)


def _parsed(text: str, units: dict[str, int]) -> Fraction | None:
    """Return ``text`` as an exact number; None where it is not one of at most 40
    digits."""
    match = _PATTERN.fullmatch(text)
    if match is None:
        return None
    unit = match["unit"].lower()
    if unit not in units:
        return None
    return Fraction(match["number"]) * units[unit]


def format_bytes(n_bytes: int | float) -> str:
    """Return ``n_bytes`` in the largest binary unit that keeps it at least one: "1.50
    GiB"."""
    size = float(n_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def format_least(n_bytes: int) -> str:
    """Return ``n_bytes`` rounded up, in one word: given as a budget, "1.51GiB" is no
    less."""
    power = max(0, n_bytes.bit_length() - 1) // 10
    unit = 1024 ** min(4, power)
    step = Fraction(1)
    if unit > 1:
        step = Fraction(unit, 100)
    n_steps = math.ceil(n_bytes / step)
    text = format_bytes(float(n_steps * step))
    return text.replace(" ", "")


def format_seconds(seconds: float) -> str:
    """Return ``seconds`` in suitable units: "85.3 ms", "6.54 s", "3 min 20 s", "4 h 28
    min", "67 days 6 h"."""
    if seconds == 0 or not math.isfinite(seconds):
        return f"{seconds:.0f} s"
    for limit, factor, unit in (
        (0.9995e-3, 1e6, "us"),
        (0.9995, 1e3, "ms"),
        (99.95, 1.0, "s"),
    ):
        if seconds < limit:
            return f"{seconds * factor:#.3g}".rstrip(".") + f" {unit}"
    return _format_long_time(seconds)


# Units of long times: seconds in a unit and in the next smaller one, and the names of
# both.
_TIME_SCALES = ((86400, 3600, "day", "h"), (3600, 60, "h", "min"), (60, 1, "min", "s"))


def _format_long_time(seconds: float) -> str:
    """Return ``seconds``, a minute or more, in two units: "4 h 28 min"."""
    for scale in _TIME_SCALES:
        unit_seconds, part_seconds, unit, part_unit = scale
        # A time that is rounded up to an hour has hours.
        if seconds >= unit_seconds - part_seconds / 2:
            break
    rounded_parts = round(seconds / part_seconds)
    n_units, n_parts = divmod(rounded_parts, unit_seconds // part_seconds)
    text = counted(n_units, unit) if unit == "day" else f"{n_units} {unit}"
    if n_parts == 0:
        return text
    return f"{text} {n_parts} {part_unit}"


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Return a number of things in words: "1 unit", "2,048 units"; "3 passes" with
    ``plural``."""
    if number == 1:
        return f"{number:,} {noun}"
    plural = plural or f"{noun}s"
    return f"{number:,} {plural}"


def format_count(number: int) -> str:
    """Return a number of tokens as options take it: "96K" for 98,304, "1M" for
    1,048,576, and "98,305"."""
    for unit, size in (("M", 1024**2), ("K", 1024)):
        if number and number % size == 0:
            return f"{number // size:,}{unit}"
    return f"{number:,}"


def format_error(error: float) -> str:
    """Return a relative error as text: "1.2e-05".

    Digits of a larger one, or of an infinite one, say nothing: "more than 1e+06".
    """
    if error <= _LARGEST_ERROR:
        return f"{error:.1e}"
    return f"more than {_LARGEST_ERROR:.0e}"
