"""Bytes and counts as people write them."""

from __future__ import annotations

import random

import pytest

from quorum_attention.sizes import parse_bytes, parse_count


@pytest.mark.parametrize(
    ("text", "n_bytes"),
    [
        ("1e9", 10**9), ("1E9", 10**9), ("1.5e3", 1500), ("1GB", 10**9), ("1GiB", 1 << 30),
        ("1G", 1 << 30), ("2 gib", 2 << 30), (".5k", 512), ("1e-3MB", 1000), ("0", 0), ("5.", 5),
        ("9007199254740993", 9007199254740993), ("0.3", 0), ("1.1KB", 1100),
    ],
)  # fmt: skip
def test_bytes(text: str, n_bytes: int) -> None:
    assert parse_bytes(text) == n_bytes


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("1M", 1 << 20), ("1m", 1 << 20), ("128K", 131_072), ("2G", 2 << 30), ("1e6", 10**6),
        ("1_048_576", 1 << 20), ("1,048,576", 1 << 20), ("1.5K", 1536), ("1.5e1", 15), (" 7 ", 7),
    ],
)  # fmt: skip
def test_counts(text: str, count: int) -> None:
    assert parse_count(text) == count


@pytest.mark.parametrize(
    "text",
    ["", "x", "-1", "1e", "e9", "1e999", "1e999999999", "9" * 400, "1MiBs", "0x10", "1 2", "nan",
     "inf", "1e99", "\u0661"],
)  # fmt: skip
def test_what_is_no_size_is_refused_in_a_line(text: str) -> None:
    for parse in (parse_bytes, parse_count):
        with pytest.raises(ValueError, match="must be") as raised:
            parse(text)
        assert len(str(raised.value)) < 200


@pytest.mark.parametrize("text", ["0", "0.5", "1.5", "1e-3", "1MB", "1KiB", "1T"])
def test_counts_are_whole(text: str) -> None:
    with pytest.raises(ValueError, match="must be"):
        parse_count(text)


@pytest.mark.parametrize("value", [1 << 63, 10**400, "9" * 400, "9" * 5000, "1e20", "1e99"])
def test_more_than_any_machine_has_is_refused(value: int | str) -> None:
    with pytest.raises(ValueError, match=r"must be less than 2\*\*63 bytes") as raised:
        parse_bytes(value)
    assert len(str(raised.value)) < 200


def test_every_number_is_exact() -> None:
    draw = random.Random(0)
    for _ in range(1000):
        n = draw.randrange(1 << draw.randrange(1, 63))
        assert parse_bytes(str(n)) == parse_bytes(n) == n
        assert parse_count(f"{n + 1:,}") == n + 1
