"""The table of long prompts."""

from __future__ import annotations

import statistics
from typing import Any

from runs import Row, newest_rows
from table_text import Line, Table

from quorum_attention.units import parse_bytes

GIB = 2**30
# The ways of benchmarks/cases/prompt.py.
WAYS = {
    "sdpa": "SDPA, cache of Transformers on the device",
    "offloaded": "SDPA, cache of Transformers in host memory",
    "chunks": "the same, the prompt in chunks",
    "heads": "one head on the device at a time",
    "long_context": "`long_context`, cache of Transformers in host memory",
    "ours": "`long_prompt`",
}

# By column: the names of the measured and of the estimated figure, its unit, and digits
# after the point.
FIGURES = {
    "seconds of the prompt": ("prefill_seconds", "prefill_seconds", 1, 2),
    "seconds of a token": ("token_seconds", "token_seconds", 1, 3),
    "device memory, GiB": ("peak_bytes", "device_bytes", GIB, 1),
    "host memory, GiB": ("host_peak_bytes", "host_bytes", GIB, 1),
}


def prompts() -> Table:
    """Seconds and memory of prompts, and of tokens after them."""
    rows = out_of_memory_rows() | newest_rows("h200-prompt", "prefill_seconds")
    columns = ["model", "tokens", "limit of device memory, GiB", "way", *FIGURES]
    names = sorted(rows, key=tokens_of)
    return Table(columns, [answer_line(name, rows[name]) for name in names])


def out_of_memory_rows() -> dict[str, Row]:
    """Prompts that ran out of memory."""
    rows = newest_rows("h200-prompt", "failed")
    return {
        name: row
        for name, row in rows.items()
        if "OutOfMemoryError" in row.value["failed"]
    }


def questions() -> Table:
    """Questions about one prompt."""
    rows = newest_rows("h200-prompt", "batch_seconds")
    columns = [
        "model",
        "tokens",
        "questions",
        "seconds of the prompt",
        "seconds of one question",
        "seconds of all, one after the other",
        "seconds of all, as one batch",
    ]
    lines = [question_line(name, row) for name, row in rows.items()]
    return Table(columns, lines)


def answer_line(name: str, row: Row) -> Line:
    if "failed" in row.value:
        return Line([*words_of(name), "out of memory", "", "", ""], [row])
    figures = [figure_cell(row.value, *column) for column in FIGURES.values()]
    return Line([*words_of(name), *figures], [row])


def figure_cell(
    row: dict[str, Any], measured: str, estimated: str, unit: int, digits: int
) -> str:
    """The measured figure, and the estimated one in brackets where a way has one."""
    if row.get(measured) is None:
        return "not recorded"
    cell = f"{row[measured] / unit:.{digits}f}"
    if row.get("estimated") is None:
        return cell
    return f"{cell} ({row['estimated'][estimated] / unit:.{digits}f})"


def question_line(name: str, row: Row) -> Line:
    model, tokens, *_ = words_of(name)
    seconds = row.value["question_seconds"]
    figures = [
        row.value["prefill_seconds"],
        statistics.median(seconds),
        sum(seconds),
        row.value["batch_seconds"],
    ]
    cells = [model, tokens, str(len(seconds)), *(f"{part:.1f}" for part in figures)]
    return Line(cells, [row])


def tokens_of(name: str) -> int:
    return int(name.split(" ")[1])


def words_of(name: str) -> tuple[str, str, str, str]:
    """Model, tokens, device memory and way of a row's name."""
    model, tokens, size, unit, way = name.split(" ", 4)
    for name, words in WAYS.items():
        if way.split(",")[0] == name:
            way = way.replace(name, words, 1)
    limit = parse_bytes(f"{size} {unit}")
    return model, f"{int(tokens):,}", f"{limit / GIB:.0f}", way
