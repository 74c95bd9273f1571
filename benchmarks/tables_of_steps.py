"""The tables of training steps, and README's."""

from __future__ import annotations

from typing import Any

from runs import Row, newest_rows
from table_text import Line, gib, mib, ratio_cell, section, table

WAYS = ("sdpa", "attention", "remedies", "everything")
# Bytes of the whole H200, and of a card of 24 GiB.
WHOLE, CARD = 146_888_654_848, 24 << 30


def steps() -> str:
    rows = newest_rows("h200-step")
    equal = rows["Qwen3-8B equal 32768"]
    distances = [
        f"{way['what']} {way['gradients_off']:.4f}" for way in equal.value["ways"]
    ]
    lines = [
        Line(
            [
                "32,768 tokens: gradients, distance from SDPA's (flash)",
                ", ".join(distances),
            ],
            [equal],
        ),
        long_step_line(rows["Qwen3-8B long 262144"]),
        first_step_line(
            "a step of {tokens:,} tokens, the first", rows["Qwen3-8B long 393216"]
        ),
        first_step_line(
            "a step of {tokens:,} tokens, the first, in 256 GiB of host memory",
            rows["Qwen3-8B long 524288"],
        ),
        first_step_line(
            "{tokens:,} tokens over two GPUs: the first step, memory of each",
            rows["Qwen3-8B long 524288 over 2"],
        ),
        longest_line(rows),
        *(card_line(rows, shape) for shape in ("Qwen3-4B", "Qwen3-0.6B")),
        estimate_line(rows["estimate"]),
    ]
    return section(["", ""], lines)


def long_step_line(row: Row) -> Line:
    long = row.value
    (last,) = long["steps"][-1:]
    how = "extrapolated" if long["extrapolated"] else "all run"
    text = (
        f"**{long['seconds']:.0f} s with all {long['of_layers']} layers, {how}** (the "
        f"first, after a step of one layer, {last['first_seconds']:.0f} s), "
        f"{last['peak'] / 2**30:.1f} GiB; attention's own "
        f"{mib(long['attention_bytes'])}"
    )
    step = f"a step of {long['tokens']:,} tokens, everything, FlashAttention-4 inside"
    return Line([step, text], [row])


def first_step_line(step: str, row: Row) -> Line:
    long = row.value
    last = long["steps"][-1]
    peak = gib(last["peak"])
    seconds = f"{long['seconds']:.0f} s"
    text = f"**{seconds} with all {long['of_layers']} layers, all run**, {peak}"
    label = step.format(tokens=long["tokens"])
    return Line([label, text], [row])


def longest_line(rows: dict[str, Row]) -> Line:
    ways = {way: rows[f"Qwen3-8B {way} in {WHOLE}"] for way in WAYS}
    texts = []
    for way, row in ways.items():
        text = f"{way}: {row.value['tokens']:,}"
        if not row.value["ran"]:
            text += " (by the line, not run)"
        texts.append(text)
    label = f"longest text in {WHOLE / 2**30:.1f} GiB"
    return Line([label, "; ".join(texts)], list(ways.values()))


def card_line(rows: dict[str, Row], shape: str) -> Line:
    """The longest texts in little memory, with some of the layers."""
    sdpa, remedies, everything = card_rows = [
        rows[f"{shape} {way} in {CARD}"] for way in ("sdpa", "remedies", "everything")
    ]
    longest = everything.value
    times = longest["tokens"] / remedies.value["tokens"]
    text = (
        f"{longest['layers']} of {longest['of_layers']} layers: SDPA "
        f"{sdpa.value['tokens']:,}, remedies {remedies.value['tokens']:,}, everything "
        f"**{longest['tokens']:,}**, {times:.1f} times, {whole_step(longest)}"
    )
    return Line(
        [f"longest text of {shape}'s shape in {gib(CARD)}, run", text], card_rows
    )


def whole_step(longest: dict[str, Any]) -> str:
    """The seconds of the longest step that ran with some of the layers; and what all
    layers take by that, with the host memory that ``estimate`` says.
    """
    seconds = longest["points"][-1]["seconds"]
    of_layers = longest["of_layers"]
    all_seconds = seconds / longest["layers"] * of_layers
    return (
        f"a step of these {seconds:.1f} s (all {of_layers} layers, not run: by that "
        f"{all_seconds:,.0f} s, and {longest['host_by_estimate'] / 2**30:.2f} GiB of "
        "host memory by `estimate`)"
    )


def estimate_line(row: Row) -> Line:
    ratios = [point["estimate"] / point["peak"] for point in row.value]
    label = (
        "peaks by `estimate --model` over measured ones, five lengths from 4,096 "
        "tokens, Qwen3-0.6B, 4B and 8B; two constants were fitted to them"
    )
    return Line([label, f"{min(ratios):.2f} to {max(ratios):.2f}"], [row])


def readme() -> str:
    """README's table."""
    lines = [*call_lines(), accuracy_line(), *readme_step_lines()]
    rows = [[*line.cells, raw_link(line.rows[-1])] for line in lines]
    return table(["case", "forward; forward+backward", "raw"], rows)


def raw_link(row: Row) -> str:
    return f"[`{row.run.origin['command']}`](benchmarks/results/{row.run.file})"


def call_lines() -> list[Line]:
    case = "1048576"
    kernels = newest_rows("h200-plain", "cudnn", "fa2")[case]
    fa4 = newest_rows("h200-plain", "fa4")[case]
    inside = "1,048,576 tokens in 1 GiB, with FlashAttention-4 inside, against it alone"
    return [
        Line(
            [
                "1,048,576 tokens in 1 GiB, against cuDNN",
                ratio_cell(kernels.value, "cudnn"),
            ],
            [kernels],
        ),
        Line(
            ["the same, against FlashAttention-2", ratio_cell(kernels.value, "fa2")],
            [kernels],
        ),
        Line([inside, ratio_cell(fa4.value, "fa4")], [fa4]),
    ]


def accuracy_line() -> Line:
    row = newest_rows("h200-accuracy", "flash", "quorum")["last of 1048576"]
    _, grad_query, _, grad_value = (
        ours / flash
        for ours, flash in zip(row.value["quorum"], row.value["flash"], strict=True)
    )
    label = (
        "error of dQ and dV at 1,048,576 tokens, last 8,192 rows, over "
        "FlashAttention-2's"
    )
    return Line([label, f"{grad_query:.2f}; {grad_value:.2f}"], [row])


def readme_step_lines() -> list[Line]:
    rows = newest_rows("h200-step")
    plain = rows[f"Qwen3-8B sdpa in {WHOLE}"]
    long = rows["Qwen3-8B long 262144"]
    two = rows["Qwen3-8B long 524288 over 2"]
    remedies = rows[f"Qwen3-4B remedies in {CARD}"]
    card = rows[f"Qwen3-4B everything in {CARD}"]
    step = (
        f"Qwen3-8B's shape, LoRA: longest step in {gib(WHOLE)} as it comes; a step of "
        f"{long.value['tokens']:,} tokens with everything"
    )
    longest = (
        f"longest text of Qwen3-4B's shape in {gib(CARD)}, {card.value['layers']} of "
        f"{card.value['of_layers']} layers run: SDPA with its usual remedies; with "
        "everything"
    )
    return [
        Line(
            [step, f"{plain.value['tokens']:,} tokens; {step_cost(long.value)}"],
            [plain, long],
        ),
        Line(
            [
                f"a step of {two.value['tokens']:,} tokens over two GPUs",
                f"{step_cost(two.value)} each",
            ],
            [two],
        ),
        Line(
            [
                longest,
                f"{remedies.value['tokens']:,}; {card.value['tokens']:,} tokens, "
                f"{whole_step(card.value)}",
            ],
            [remedies, card],
        ),
    ]


def step_cost(long: dict[str, Any]) -> str:
    return f"{long['seconds']:.0f} s in {gib(long['steps'][-1]['peak'])}"
