"""The table of long prompts."""

from __future__ import annotations

import statistics
from typing import Any

from runs import Row, newest_rows
from table_text import Line, section

GIB = 2**30


def prompts() -> str:
    """Seconds of prompts and of tokens after them, and questions about one prompt."""
    rows = newest_rows("h200-prompt", "prefill_seconds")
    columns = [
        "model",
        "tokens",
        "device",
        "way",
        "prompt",
        "a token",
        "peak",
        "estimated",
    ]
    names = sorted(rows, key=tokens_of)
    answers = section(columns, [answer_line(name, rows[name]) for name in names])
    batch_rows = newest_rows("h200-prompt", "batch_seconds")
    columns = ["model", "tokens", "one question", "one after the other", "as a batch"]
    questions = section(
        columns, [question_line(name, row) for name, row in batch_rows.items()]
    )
    return f"""{answers}
Questions about a prompt that is in the cache: the seconds of the prompt and all questions, over those of the prompt and one.

{questions}"""


def answer_line(name: str, row: Row) -> Line:
    model, tokens, device, way = words_of(name)
    figures = row.value
    cells = [
        model,
        tokens,
        device,
        way,
        f"{figures['prefill_seconds']:.2f} s",
        f"{figures['token_seconds']:.3f} s",
        f"{figures['peak_bytes'] / GIB:.1f} GiB",
        estimated_cell(figures),
    ]
    return Line(cells, [row])


def estimated_cell(figures: dict[str, Any]) -> str:
    """The estimated figures; empty for ways without an estimate."""
    estimated = figures.get("estimated")
    if estimated is None:
        return ""
    return (
        f"{estimated['prefill_seconds']:.2f} s, {estimated['token_seconds']:.3f} s, "
        f"{estimated['device_bytes'] / GIB:.1f} GiB"
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
    return model, f"{int(tokens):,}", f"{float(size):.0f} {unit}", way
