"""The table of long prompts."""

from __future__ import annotations

import statistics
from typing import Any

from runs import Row, newest_rows
from table_text import Line, Table

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


def prompts() -> Table:
    """Seconds of prompts and of tokens after them."""
    rows = out_of_memory_rows() | newest_rows("h200-prompt", "prefill_seconds")
    columns = [
        "model",
        "tokens",
        "device",
        "way",
        "prompt",
        "a token",
        "device memory",
        "host memory",
        "estimated",
    ]
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
    columns = ["model", "tokens", "one question", "one after the other", "as a batch"]
    lines = [question_line(name, row) for name, row in rows.items()]
    return Table(columns, lines)


def answer_line(name: str, row: Row) -> Line:
    model, tokens, device, way = words_of(name)
    figures = row.value
    if "failed" in figures:
        empty_cells = ["", "", "", ""]
        cells = [model, tokens, device, way, "out of memory", *empty_cells]
        return Line(cells, [row])
    cells = [
        model,
        tokens,
        device,
        way,
        f"{figures['prefill_seconds']:.2f} s",
        f"{figures['token_seconds']:.3f} s",
        f"{figures['peak_bytes'] / GIB:.1f} GiB",
        host_cell(figures),
        estimated_cell(figures),
    ]
    return Line(cells, [row])


def host_cell(figures: dict[str, Any]) -> str:
    """The measured peak of the process, if it was recorded."""
    peak = figures.get("host_peak_bytes")
    return "not recorded" if peak is None else f"{peak / GIB:.1f} GiB"


def estimated_cell(figures: dict[str, Any]) -> str:
    """The estimated figures; empty for ways without an estimate."""
    estimated = figures.get("estimated")
    if estimated is None:
        return ""
    return (
        f"{estimated['prefill_seconds']:.2f} s, {estimated['token_seconds']:.3f} s, "
        f"{estimated['device_bytes'] / GIB:.1f} GiB, "
        f"host {estimated['host_bytes'] / GIB:.1f} GiB"
    )


def question_line(name: str, row: Row) -> Line:
    model, tokens, *_ = words_of(name)
    figures = row.value
    singles = figures["question_seconds"]
    prompt = figures["prefill_seconds"]
    question = statistics.median(singles)
    prompt_and_question = prompt + question
    in_turn = (prompt + len(singles) * question) / prompt_and_question
    as_batch = (prompt + figures["batch_seconds"]) / prompt_and_question
    cells = [model, tokens, f"{question:.2f} s", f"{in_turn:.2f}", f"{as_batch:.2f}"]
    return Line(cells, [row])


def tokens_of(name: str) -> int:
    return int(name.split(" ")[1])


def words_of(name: str) -> tuple[str, str, str, str]:
    """Model, tokens, device memory and way of a row's name."""
    model, tokens, size, unit, way = name.split(" ", 4)
    for name, words in WAYS.items():
        if way.split(",")[0] == name:
            way = way.replace(name, words, 1)
    return model, f"{int(tokens):,}", f"{float(size):.0f} {unit}", way
