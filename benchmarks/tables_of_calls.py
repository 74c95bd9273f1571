"""Tables of plain calls, of small calls and of many small entries."""

from __future__ import annotations

from statistics import median
from typing import Any

import torch
from cases.entries import WORDS
from cases.plain import CASES, Case
from paper import PAPER
from runs import Row, newest_rows
from table_text import Line, Table, later_seconds, mib, ratio_cell

from quorum_attention.units import parse_bytes

# Of tables of plain calls. Seconds and ratios are of a forward; of both passes.
CALL_COLUMNS = [
    "call",
    "budget, MiB",
    "seconds",
    "device memory, MiB",
    "tensors in host memory, GiB",
]
OVER_OTHERS = ["time over FlashAttention-2's", "time over cuDNN's"]


def cost() -> Table:
    rows = newest_rows("h200-plain", "fa2")
    lines = []
    for tokens, cells in PAPER["cost"]["rows"].items():
        row = rows.get(tokens)
        ours = ["", ""]
        if row is not None:
            ours = [ratio_cell(row.value, "fa2"), mib(row.value["peak_bytes"])]
        theirs = [cost_cell(cell) for cell in cells]
        lines.append(Line([f"{int(tokens):,}", *ours, *theirs], [row] if row else []))
    theirs = [f"theirs: {column}" for column in PAPER["cost"]["columns"]]
    return Table(
        ["tokens", "ours: time over FlashAttention-2's", "ours: peak, MiB", *theirs],
        lines,
    )


def cost_cell(cell: Any) -> str:
    """Time and memory over FlashAttention-2's; or words; or None where memory ran
    out."""
    if isinstance(cell, list):
        seconds, memory = cell
        return f"{seconds:.3g}, {memory:.2f}"
    return cell or "oom"


def budgets() -> Table:
    lines = []
    for name, row in plain_rows("cudnn").items():
        if CASES[name].place == "device":
            continue
        case = row.value
        ratios = [ratio_cell(case, "fa2"), ratio_cell(case, "cudnn")]
        lines.append(Line([*call_cells(CASES[name], case), *ratios], [row]))
    columns = [*CALL_COLUMNS, *OVER_OTHERS]
    return Table(columns, lines)


def call_cells(case: Case, figures: dict[str, Any]) -> list[str]:
    """The cells below ``CALL_COLUMNS``."""
    forward, both_passes = later_seconds(figures["now"])
    return [
        case_words(case),
        "none" if case.budget is None else mib(parse_bytes(case.budget)),
        f"{forward:.3g}; {both_passes:.3g}",
        mib(figures.get("peak_bytes")),
        host_cell(case),
    ]


def host_cell(case: Case) -> str:
    """GiB of all inputs and results of both passes, where these are in host
    memory."""
    if case.place == "device":
        return "0"
    # Query, output and their gradients; key, value and their gradients.
    n_heads = 4 * case.heads + 4 * case.kv_heads
    n_bytes = n_heads * case.tokens * case.head_dim * case.dtype.itemsize
    return f"{n_bytes / 2**30:.3g}"


def beside_fa4() -> Table:
    lines = []
    for name, row in plain_rows("fa4").items():
        cells = [*call_cells(CASES[name], row.value), ratio_cell(row.value, "fa4")]
        lines.append(Line(cells, [row]))
    return Table([*CALL_COLUMNS, "time over FlashAttention-4's"], lines)


def plain_rows(*methods: str) -> dict[str, Row]:
    """The newest measurements of plain calls beside other methods, in the order of the
    cases."""
    rows = newest_rows("h200-plain", *methods)
    return {name: rows[name] for name in CASES if name in rows}


def case_words(case: Case) -> str:
    """A plain call in words, without its budget."""
    words = [f"{case.tokens:,} tokens"]
    if case.batch > 1:
        words[0] = f"{case.batch} entries of {words[0]}"
    if (case.heads, case.kv_heads, case.head_dim) != (8, 8, 64):
        shared = "" if case.heads == case.kv_heads else f" over {case.kv_heads}"
        words.append(f"{case.heads} heads{shared} of {case.head_dim}")
    if case.dtype != torch.float16:
        words.append("bf16")
    if case.window:
        words.append(f"a window of {case.window:,}")
    if case.place != "pinned":
        words.append(
            {"device": "on the device", "pageable": "in ordinary memory"}[case.place]
        )
    if case.kernel != "auto":
        words.append(
            "compiled FlexAttention" if case.kernel == "flex" else f"`{case.kernel}`"
        )
    if case.depth != "auto":
        words.append(f"depth {case.depth}")
    return ", ".join(words)


def windows() -> Table:
    lines = [
        Line(
            [case_words(CASES[name]), now_cell(row), ratio_cell(row.value, "flex")],
            [row],
        )
        for name, row in plain_rows("flex").items()
    ]
    return Table(["call", "seconds", "time over FlexAttention's"], lines)


def now_cell(row: Row) -> str:
    """Our seconds: forward; forward and backward."""
    return "; ".join(f"{seconds:.3g}" for seconds in later_seconds(row.value["now"]))


def native() -> Table:
    """Our own kernel beside others, on the device."""
    rows = newest_rows("h200-plain", "cudnn", "fa2")
    lines = []
    for name in ("131072-device", "131072x128-device"):
        row = rows[f"{name}, native"]
        ratios = [ratio_cell(row.value, rival) for rival in ("fa2", "cudnn")]
        case = CASES[name]
        lines.append(Line([str(case.head_dim), now_cell(row), *ratios], [row]))
    columns = ["head dimension", "seconds", *OVER_OTHERS]
    return Table(columns, lines)


def small() -> Table:
    lines = []
    for name, row in newest_rows("cpu-small").items():
        if "float32" in name:
            forward = row.value["forward"]["beyond"]
            both_passes = row.value["forward+backward"]["beyond"]
            lines.append(Line([name, f"{forward:+.0f}", f"{both_passes:+.0f}"], [row]))
    columns = [
        "batch x heads x queries x keys",
        "forward: microseconds more",
        "forward and backward: microseconds more",
    ]
    return Table(columns, lines)


def entries() -> Table:
    """On a CPU, then on a GPU."""
    devices = {"one thread of a CPU": "cpu-entries", "H200": "h200-entries"}
    lines = []
    for device, runs in devices.items():
        rows = newest_rows(runs, "ratio")
        for name in (name for name in WORDS if name in rows):
            row = rows[name]
            seconds = median(row.value["seconds"]["quorum"][1:])
            cells = [WORDS[name], device, f"{seconds:.2g}", f"{row.value['ratio']:.2f}"]
            lines.append(Line(cells, [row]))
    return Table(["calls", "device", "seconds", "time over torch's"], lines)
