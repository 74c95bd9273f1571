"""Bytes and seconds as people read and write them."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from helpers.sources import SOURCES, syntax_tree

import quorum_attention as qa
from quorum_attention.arithmetic import last_fitting
from quorum_attention.ray import Farm
from quorum_attention.recipes.training import Training
from quorum_attention.units import (
    counted,
    format_error,
    format_least,
    format_seconds,
    parse_bytes,
    parse_count,
    parse_memory,
)

# What messages count, as it stands behind a number that may be one.
PLURALS = re.compile(
    "backwards|calls|chunks|cuts|devices|draws|entries|forwards|groups|heads|keys|kernels|layers|parts|passes|pairs|processes|queries|ranks|rectangles|rounds|rows|schedules|slots|spans|tasks|threads|times|tokens|units|ways|workers"
)
# Numbers that are never one, or stand in words of another sense.
_ELSEWHERE = {
    "heads at most",  # of a grid
    "tokens, got a CausalBias",  # of two lengths
    "heads, got",  # "a multiple of the key's 2 heads"
    "rows each",
    "times and its worker",  # of _RETRIES
    "chunks",  # "7 x 7 chunks": of several, or of a quorum set
}


def test_any_duration_reads_back_as_itself() -> None:
    sizes = {"us": 1e-6, "ms": 1e-3, "s": 1, "min": 60, "h": 3600, "day": 86400}
    draw = random.Random("durations")
    for _ in range(2000):
        seconds = 10 ** draw.uniform(-6, 10)
        text = format_seconds(seconds)
        parts = re.findall(r"([0-9.,]+) (us|ms|s|min|h|day)s?\b", text)
        read = sum(
            float(number.replace(",", "")) * sizes[unit] for number, unit in parts
        )
        assert abs(read - seconds) <= 0.022 * seconds, text
        assert "e+" not in text


def test_a_least_size_as_printed_is_enough_and_hardly_more() -> None:
    draw = random.Random("sizes")
    every = [
        0,
        1,
        1023,
        1024,
        1025,
        2**20 - 1,
        2**20,
        2**20 + 1,
        27_789_312,
        2**40 + 1,
        2**60 + 1,
    ]
    for n in [*every, *(int(10 ** draw.uniform(0, 18)) for _ in range(5000))]:
        text = format_least(n)
        assert n <= parse_bytes(text) <= n + n // 100, text
        assert text.split() == [text]  # one argument of a command


def test_memory_without_a_unit_is_refused_by_name() -> None:
    """16 was meant to be 16 GiB, and 24576 MiB."""
    for wrong in (16, "16", 24576, 0, 1.0, 2**20 - 1):
        with pytest.raises(ValueError, match="host_memory must be at least 1") as error:
            parse_memory(wrong, "host_memory")
        assert "'16GiB', got" in str(error.value)
    for right in (2**20, "1MiB", "16GiB", 16e9):
        assert parse_memory(right, "host_memory") == parse_bytes(right)
    assert parse_memory(0, "host_memory", or_zero=True) == 0
    with pytest.raises(ValueError, match="which is 1 byte"):
        parse_memory(1, "host_memory", or_zero=True)


LATER: dict[str, Callable[[Any], Any]] = {
    "using": lambda budget: qa.using(budget=budget),
    "patch_sdpa": lambda budget: qa.patch_sdpa(budget=budget),
    "patched_sdpa": lambda budget: qa.patched_sdpa(budget=budget),
    "patched_flex_attention": lambda budget: qa.patched_flex_attention(budget=budget),
    "Training": lambda budget: Training(10, budget=budget),
    "Farm": lambda budget: Farm(budget=budget),
}


@pytest.mark.parametrize("function", LATER)
@pytest.mark.parametrize("budget", [0, 16, 1023, True, -1, float("nan")])
def test_budgets_of_later_calls_are_checked_at_once(function: str, budget: Any) -> None:
    """16 was taken for a budget: the first call failed, perhaps hours later."""
    with pytest.raises((TypeError, ValueError), match=r"^budget must"):
        LATER[function](budget)


def test_whole_floats_are_bytes() -> None:
    assert parse_bytes(1e9) == parse_bytes("1e9") == 10**9
    assert parse_bytes(0.0) == 0
    for wrong in (1.5, float("nan"), float("inf")):
        with pytest.raises(TypeError, match="budget must be a whole number of bytes"):
            parse_bytes(wrong)
    for wrong in (-1.0, 1e19):
        with pytest.raises(ValueError, match="budget must"):
            parse_bytes(wrong)


BYTES = {
    "1e9": 10**9, "1E9": 10**9, "1.5e3": 1500, "1GB": 10**9, "1GiB": 1 << 30, "1G": 1 << 30,
    "2 gib": 2 << 30, ".5k": 512, "1e-3MB": 1000, "0": 0, "5.": 5, "0.3": 0, "1.1KB": 1100,
    "9007199254740993": 9007199254740993,
}  # fmt: skip
COUNTS = {
    "1M": 1 << 20, "1m": 1 << 20, "128K": 131_072, "2G": 2 << 30, "1e6": 10**6, "1.5e1": 15,
    "1_048_576": 1 << 20, "1,048,576": 1 << 20, "1.5K": 1536, " 7 ": 7,
}  # fmt: skip


def test_bytes_and_counts() -> None:
    assert {text: parse_bytes(text) for text in BYTES} == BYTES
    assert {text: parse_count(text) for text in COUNTS} == COUNTS


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


def test_counts_and_nouns_agree() -> None:
    assert counted(1, "pass", "passes") == "1 pass"
    assert counted(2, "pass", "passes") == "2 passes"
    assert counted(2048, "unit") == "2,048 units"
    assert counted(0, "unit") == "0 units"


def test_errors_have_no_digits_that_say_nothing() -> None:
    assert format_error(1.234e-5) == "1.2e-05"
    assert format_error(3.0e307) == format_error(float("inf")) == "more than 1e+06"


def numbers_before_plurals(path: Path) -> list[str]:
    """The words that follow a number in a text, where `counted` did not write it."""
    found = []
    for node in ast.walk(syntax_tree(path)):
        if not isinstance(node, ast.JoinedStr):
            continue
        for value, text in zip(node.values, node.values[1:], strict=False):
            if isinstance(value, ast.FormattedValue) and isinstance(text, ast.Constant):
                words = re.match(
                    r" (?:[a-z]+/|head )?([a-z]+)\b.{0,20}", str(text.value)
                )
                if words and PLURALS.fullmatch(words[1]):
                    found.append(words[0].strip())
    return found


def test_no_message_says_one_passes() -> None:
    wrong = [
        f"{path}: {words}"
        for path in SOURCES
        for words in numbers_before_plurals(path)
        if not any(words.startswith(start) for start in _ELSEWHERE)
    ]
    assert not wrong, "units.counted writes a number and its noun"


@pytest.mark.parametrize("largest", [0, 1, 7, 10])
def test_the_last_number_that_fits(largest: int) -> None:
    """The longest text and the longest prompt are found by this."""
    assert last_fitting(10, lambda number: number <= largest) == largest
