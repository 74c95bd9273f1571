"""The tables of training steps."""

from __future__ import annotations

import re

from runs import Row, newest_rows
from table_text import Line, Table, gib

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
    columns = [
        "tokens",
        "GPUs",
        "seconds of a step",
        "memory of each GPU, GiB",
        "host memory, GiB",
    ]
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
    machine = re.search(r"in (\d+) GiB of host memory", row.run.origin.get("note", ""))
    return f"at most {machine[1]}: the machine's" if machine else "not recorded"


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
        "device memory, GiB",
        "way",
        "longest text, tokens",
        "layers run",
        "host memory for all layers, GiB (predicted)",
    ]
    return Table(columns, lines)


def longest_line(row: Row, shape: str, way: str, memory: int) -> Line:
    value = row.value
    tokens = f"{value['tokens']:,}"
    # Rows without the word hold what was run.
    if value.get("ran") is False:
        tokens += " (not run: extrapolated)"
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
    return Table(["shape", "predicted peak over measured peak"], lines)
