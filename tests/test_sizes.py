"""Seconds as people read them."""

from __future__ import annotations

import random
import re

import pytest

from quorum_attention.sizes import format_seconds


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
