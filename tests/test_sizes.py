"""Bytes and seconds as people read and write them."""

from __future__ import annotations

import random
import re

import pytest

from quorum_attention.sizes import format_least, format_seconds, parse_bytes


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 s"),
        (3.3e-6, "3.30 us"),
        (0.0853, "85.3 ms"),
        (0.9996, "1.00 s"),
        (9.996, "10.0 s"),
        (99.94, "99.9 s"),
        (99.96, "1 min 40 s"),
        (3599.6, "1 h"),
        (1.61e4, "4 h 28 min"),
        (86_401, "1 day"),
        (5.81e6, "67 days 6 h"),
        (1e9, "31 years 259 days"),
        (float("inf"), "inf s"),
    ],
)
def test_units_that_fit(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text


def test_any_duration_reads_back_as_itself() -> None:
    sizes = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "day": 86400, "year": 31536000}
    draw = random.Random("durations")
    for _ in range(2000):
        seconds = 10 ** draw.uniform(-6, 10)
        text = format_seconds(seconds)
        parts = re.findall(r"([0-9.,]+) (us|ms|s|min|h|day|year)s?\b", text)
        read = sum(float(number.replace(",", "")) * sizes[unit] for number, unit in parts)
        assert abs(read - seconds) <= 0.022 * seconds, text
        assert "e" not in text.replace("year", "")


def test_a_least_size_as_printed_is_enough_and_hardly_more() -> None:
    draw = random.Random("sizes")
    every = [0, 1, 1023, 1024, 1025, 2**20 - 1, 2**20, 2**20 + 1, 27_789_312, 2**40 + 1, 2**60 + 1]
    for n in [*every, *(int(10 ** draw.uniform(0, 18)) for _ in range(5000))]:
        text = format_least(n)
        assert n <= parse_bytes(text) <= n + n // 100, text
        assert text.split() == [text]  # one argument of a command


def test_whole_floats_are_bytes() -> None:
    assert parse_bytes(1e9) == parse_bytes("1e9") == 10**9
    assert parse_bytes(0.0) == 0
    for wrong in (1.5, float("nan"), float("inf")):
        with pytest.raises(TypeError, match="budget must be a whole number of bytes"):
            parse_bytes(wrong)
    for wrong in (-1.0, 1e19):
        with pytest.raises(ValueError, match="budget must"):
            parse_bytes(wrong)
