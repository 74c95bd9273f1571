"""The tables of training steps, and README's."""

from __future__ import annotations

import re
from typing import Any

from runs import Row, Run, newest_rows
from table_text import Line, Table, gib, ratio_cell, table_text

WAYS = {
    "sdpa": "SDPA, as it comes",
    "attention": "only attention in a budget",
    "remedies": "SDPA, chunked loss, checkpoints in host memory",
    "everything": "`long_context`",
}
# What runs call the ways whose gradients they compare.
GRADIENT_WAYS = {
    "SDPA (cudnn_attention)": "SDPA, cuDNN's kernel",
    "attention recovered": "only attention in a budget",
    "everything": "`long_context`",
}
CARD_WAYS = ("sdpa", "remedies", "everything")
LONG = (262_144, 393_216, 524_288)
# Bytes of the whole H200, and of a card of 24 GiB.
WHOLE, CARD = 146_888_654_848, 24 << 30


def steps() -> Table:
    """Seconds and memory of steps that ran with all layers."""
    rows = newest_rows("h200-step")
    names = (
        *(f"Qwen3-8B long {tokens}" for tokens in LONG),
        "Qwen3-8B long 524288 over 2",
    )
    columns = ["tokens", "GPUs", "seconds of a step", "memory of a GPU", "host memory"]
    return Table(columns, [long_step_line(name, rows[name]) for name in names])


def long_step_line(name: str, row: Row) -> Line:
    step = row.value
    cells = [
        f"{step['tokens']:,}",
        "2" if name.endswith("over 2") else "1",
        f"{step['seconds']:.0f}",
        gib(step["steps"][-1]["peak"]),
        host_cell(row),
    ]
    return Line(cells, [row])


def host_cell(row: Row) -> str:
    """The peak of the process, or what the machine has, or that neither was
    recorded."""
    peak = row.value["steps"][-1].get("host_peak")
    if peak is not None:
        return gib(peak)
    machine = re.search(r"in (\d+ GiB) of host memory", row.run.origin.get("note", ""))
    return f"{machine[1]} in the machine" if machine else "not recorded"


def longest() -> Table:
    """The longest text by model, memory and way."""
    rows = newest_rows("h200-step")
    lines = [
        longest_line(rows[f"Qwen3-8B {way} in {WHOLE}"], "Qwen3-8B", way, WHOLE)
        for way in WAYS
    ]
    for shape in ("Qwen3-4B", "Qwen3-0.6B"):
        lines += [
            longest_line(rows[f"{shape} {way} in {CARD}"], shape, way, CARD)
            for way in CARD_WAYS
        ]
    columns = [
        "shape",
        "memory",
        "way",
        "longest text",
        "layers run",
        "host memory for all layers",
    ]
    return Table(columns, lines)


def longest_line(row: Row, shape: str, way: str, memory: int) -> Line:
    value = row.value
    tokens = f"{value['tokens']:,}"
    # Rows without the word hold what was run.
    if value.get("ran") is False:
        tokens += " (extrapolated from shorter steps)"
    layers = f"{value['layers']} of {value['of_layers']}"
    host = value.get("host_by_estimate")
    host_cell = "" if host is None else gib(host)
    return Line([shape, gib(memory), WAYS[way], tokens, layers, host_cell], [row])


def gradients() -> Table:
    """The distance of gradients from SDPA's."""
    row = newest_rows("h200-step")["Qwen3-8B equal 32768"]
    lines = [
        Line(
            [
                GRADIENT_WAYS.get(way["what"], way["what"]),
                f"{way['gradients_off']:.4f}",
                f"{way['seconds']:.1f}",
            ],
            [row],
        )
        for way in row.value["ways"]
    ]
    return Table(["way", "distance of gradients", "seconds of a step"], lines)


def estimates() -> Table:
    """Estimated peaks over measured ones."""
    row = newest_rows("h200-step")["estimate"]
    by_shape: dict[str, list[float]] = {}
    for point in row.value:
        ratio = point["estimate"] / point["peak"]
        by_shape.setdefault(point["shape"], []).append(ratio)
    lines = [
        Line([shape, f"{min(ratios):.2f} to {max(ratios):.2f}"], [row])
        for shape, ratios in by_shape.items()
    ]
    return Table(["shape", "estimated over measured peak"], lines)


def whole_step(longest: dict[str, Any]) -> str:
    """What a step of all layers takes by the longest step that ran with some of them,
    with the host memory that ``estimate`` predicts.
    """
    seconds = longest["points"][-1]["seconds"]
    all_seconds = seconds / longest["layers"] * longest["of_layers"]
    host = gib(longest["host_by_estimate"])
    return f"{all_seconds:,.0f} s, {host} of host memory"


def readme() -> str:
    """README's table: lines of the present code."""
    lines = [*call_lines(), accuracy_line(), *readme_step_lines()]
    rows = [
        [*line.cells, raw_link(line.rows[-1].run)] for line in lines if not line.is_old
    ]
    return table_text(["what", "measured", "command"], rows)


def raw_link(run: Run) -> str:
    return f"[`{run.origin['command']}`](benchmarks/results/{run.file})"


def call_lines() -> list[Line]:
    case = "1048576"
    kernels = newest_rows("h200-plain", "cudnn", "fa2")[case]
    fa4 = newest_rows("h200-plain", "fa4")[case]
    inside = "the same, with FlashAttention-4 inside, over it alone"
    return [
        Line(
            [
                "time of 1,048,576 tokens in 1 GiB, over cuDNN's",
                ratio_cell(kernels.value, "cudnn"),
            ],
            [kernels],
        ),
        Line(
            ["the same, over FlashAttention-2's", ratio_cell(kernels.value, "fa2")],
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
        "errors of dQ; dV at 1,048,576 tokens, last 8,192 rows, over FlashAttention-2's"
    )
    return Line([label, f"{grad_query:.2f}; {grad_value:.2f}"], [row])


def readme_step_lines() -> list[Line]:
    rows = newest_rows("h200-step")
    plain = rows[f"Qwen3-8B sdpa in {WHOLE}"]
    long = rows["Qwen3-8B long 262144"]
    two = rows["Qwen3-8B long 524288 over 2"]
    remedies = rows[f"Qwen3-4B remedies in {CARD}"]
    card = rows[f"Qwen3-4B everything in {CARD}"]
    layers = f"{card.value['layers']} of {card.value['of_layers']} layers run"
    return [
        Line(
            [
                f"longest step of Qwen3-8B's shape as it comes, LoRA, in {gib(WHOLE)}",
                f"{plain.value['tokens']:,} tokens",
            ],
            [plain],
        ),
        Line(
            [
                f"a step of {long.value['tokens']:,} tokens with `long_context`",
                step_cost(long.value),
            ],
            [long],
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
                f"longest step of Qwen3-4B's shape in {gib(CARD)}, {layers}: SDPA, "
                "chunked loss, checkpoints in host memory",
                f"{remedies.value['tokens']:,} tokens",
            ],
            [remedies],
        ),
        Line(
            ["the same with `long_context`", f"{card.value['tokens']:,} tokens"],
            [card],
        ),
        Line(
            [
                f"a step of this length with all {card.value['of_layers']} layers, "
                "not run: calculated from that and from `estimate`",
                whole_step(card.value),
            ],
            [card],
        ),
    ]


def step_cost(long: dict[str, Any]) -> str:
    return f"{long['seconds']:.0f} s in {gib(long['steps'][-1]['peak'])}"
