"""What README says of measurements: a headline, words about prompts, and a table.

Each is of rows of the present code. What was not measured on it is left out.
"""

from __future__ import annotations

import textwrap
from typing import Any

from runs import Row, Run, newest_rows, present_rows
from table_text import Line, gib, ratio_cell, table_text
from tables_of_prompts import out_of_memory_rows, tokens_of
from tables_of_steps import CARD, CARD_WAYS, WAYS, WHOLE

COLUMNS = 128
README_WAYS = {**WAYS, "sdpa": "SDPA and the unchanged model"}
# Tokens, and GiB of the device.
LONG_PROMPTS = ((262_144, 24), (1_048_576, 16))


def headline() -> str:
    """A long training step, and the longest one without the package."""
    rows = present_rows("h200-step")
    long = rows.get("Qwen3-8B long 262144")
    if long is None:
        return ""
    step = long.value
    sentences = [
        "One H200 trains a model of Qwen3-8B's shape (LoRA, all 36 layers) on "
        f"{step['tokens']:,} tokens at a time. "
        f"A step takes {step['seconds']:.0f} s, with {step_memory(long)}."
    ]
    plain = rows.get(f"Qwen3-8B sdpa in {WHOLE}")
    if plain is not None:
        tokens = plain.value["tokens"]
        sentences.append(
            f"The unchanged model, without gradient checkpointing, trains on at most "
            f"{tokens:,} tokens."
        )
    return paragraph(*sentences, "[How it was measured](#what-was-measured).")


def step_memory(row: Row, of: str = "the GPU") -> str:
    """The memory of a step's GPU, and of its host if that was recorded."""
    last = row.value["steps"][-1]
    words = f"{gib(last['peak'])} GiB of {of}"
    if last.get("host_peak") is None:
        return words
    return f"{words} and {gib(last['host_peak'])} GiB of host memory"


def prompt() -> str:
    """A long prompt, and the longest one without the package."""
    rows = present_rows("h200-prompt", "prefill_seconds")
    if "Qwen3-4B 262144 24.00 GiB ours" not in rows:
        return ""
    fit, fail = (
        [tokens_of(name) for name in names if name.endswith("24.00 GiB sdpa")]
        for names in (rows, out_of_memory_rows())
    )
    return paragraph(
        "One H200 ran a model of Qwen3-4B's shape, with all its 36 layers.",
        *(
            prompt_sentence(tokens, memory, rows[name].value)
            for tokens, memory in LONG_PROMPTS
            if (name := f"Qwen3-4B {tokens} {memory}.00 GiB ours") in rows
        ),
        "In 24 GiB, SDPA with Transformers' own cache runs "
        f"{max(fit):,} tokens, and fails at {min(fail):,}.",
    )


def prompt_sentence(tokens: int, memory: int, figures: dict[str, Any]) -> str:
    host = gib(figures["host_peak_bytes"])
    return (
        f'With `device_memory="{memory}GiB"` a prompt of {tokens:,} tokens takes '
        f"{figures['prefill_seconds']:.0f} s and {host} GiB of host memory. Each new "
        f"token takes {figures['token_seconds']:.1f} s."
    )


def paragraph(*sentences: str) -> str:
    return textwrap.fill(" ".join(sentences), COLUMNS, break_on_hyphens=False) + "\n"


def measured() -> str:
    """The table."""
    lines = [*call_lines(), *accuracy_lines(), *step_lines()]
    rows = [
        [*line.cells, raw_link(line.rows[-1].run)] for line in lines if not line.is_old
    ]
    return table_text(["what", "measured", "command"], rows)


def raw_link(run: Run) -> str:
    return f"[`{run.origin['command']}`](benchmarks/results/{run.file})"


def call_lines() -> list[Line]:
    call = "time of a call of 1,048,576 tokens"
    kernels = newest_rows("h200-plain", "cudnn", "fa2")["1048576"]
    fa4 = newest_rows("h200-plain", "fa4")["1048576-256MiB"]
    in_gibibyte = f"{call} in 1 GiB, divided by"
    labels = {
        f"{in_gibibyte} cuDNN's": ratio_cell(kernels.value, "cudnn"),
        f"{in_gibibyte} FlashAttention-2's": ratio_cell(kernels.value, "fa2"),
    }
    inside = (
        f"{call} in 256 MiB with FlashAttention-4 inside, divided by the time of "
        "FlashAttention-4 alone"
    )
    return [
        *(Line([label, ratio], [kernels]) for label, ratio in labels.items()),
        Line([inside, ratio_cell(fa4.value, "fa4")], [fa4]),
    ]


def accuracy_lines() -> list[Line]:
    row = newest_rows("h200-accuracy", "flash", "quorum")["last of 1048576"]
    _, grad_query, _, grad_value = (
        ours / flash
        for ours, flash in zip(row.value["quorum"], row.value["flash"], strict=True)
    )
    where = (
        "in a call of 1,048,576 tokens, in rows drawn from the last 8,192, divided by "
        "FlashAttention-2's error"
    )
    return [
        Line([f"error of dQ {where}", f"{grad_query:.2f}"], [row]),
        Line([f"error of dV {where}", f"{grad_value:.2f}"], [row]),
    ]


def step_lines() -> list[Line]:
    rows = newest_rows("h200-step")
    lines = []
    for name, words in {
        "Qwen3-8B long 262144": "one GPU",
        "Qwen3-8B long 393216": "one GPU",
        "Qwen3-8B long 524288": "one GPU",
        "Qwen3-8B long 524288 over 2": "each of two GPUs",
    }.items():
        step = rows[name].value
        label = f"a training step of Qwen3-8B's shape on {step['tokens']:,} tokens"
        cell = f"{step['seconds']:.0f} s, {step_memory(rows[name], words)}"
        lines.append(Line([label, cell], [rows[name]]))
    for shape, memory, ways in (
        ("Qwen3-8B", WHOLE, ("sdpa",)),
        ("Qwen3-4B", CARD, CARD_WAYS),
    ):
        for way in ways:
            row = rows[f"{shape} {way} in {memory}"]
            layers = layers_words(row.value)
            label = (
                f"the longest text of a training step of {shape}'s shape in "
                f"{gib(memory)} GiB of one GPU, with {README_WAYS[way]}; {layers}"
            )
            cells = [label, f"{row.value['tokens']:,} tokens"]
            lines.append(Line(cells, [row]))
    return lines


def layers_words(step: dict[str, Any]) -> str:
    """How many layers ran, and the host memory that all of them would take, if that was
    predicted."""
    layers, of_layers = step["layers"], step["of_layers"]
    if layers == of_layers:
        return f"all {layers} layers ran"
    words = f"{layers} of {of_layers} layers ran"
    host_bytes = step.get("host_by_estimate")
    if host_bytes is None:
        return words
    return f"{words} (all {of_layers}: {gib(host_bytes)} GiB of host memory, predicted)"
