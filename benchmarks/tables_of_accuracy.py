"""Tables of errors, and of the tiles of the score square."""

from __future__ import annotations

from itertools import product
from statistics import mean
from typing import Any

from paper import PAPER
from runs import Row, newest_rows
from table_text import Line, Table

from quorum_attention.bench.methods import GRADIENTS
from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.decomposition import census as census_of

METHODS = {
    "flash": "FlashAttention-2 (torch)",
    "cudnn": "cuDNN (torch)",
    "fa4": "FlashAttention-4",
    "efficient": "memory-efficient (torch)",
    "quorum": "ours, as planned",
    "quorum-device": "ours, inputs on the device",
    "quorum-depth-1": "ours, depth 1",
    "quorum-depth-2": "ours, depth 2",
}


def accuracy() -> Table:
    """Forward in both dtypes, then backward in both."""
    theirs = PAPER["accuracy"]
    lines = [
        Line([f"paper: {method}", *(f"{error:.3e}" for error in errors)])
        for method, errors in theirs["rows"].items()
    ]
    for method, rows in measured_errors().items():
        cells = [
            error_cell(rows.get(dtype), results)
            for results, dtype in product(
                (("out",), GRADIENTS), ("float16", "bfloat16")
            )
        ]
        lines.append(
            Line([f"here: {METHODS.get(method, method)}", *cells], list(rows.values()))
        )
    return Table(["method", *theirs["columns"]], lines)


def measured_errors() -> dict[str, dict[str, Row]]:
    """The rows of ``quorum-attention bench --only accuracy`` by method and dtype."""
    by_method: dict[str, dict[str, Row]] = {}
    for row in newest_rows("h200-bench", "spec").values():
        spec = row.value["spec"]
        if row.value["experiment"] == "accuracy":
            by_method.setdefault(spec["method"], {})[spec["dtype"]] = row
    return by_method


def error_cell(row: Row | None, results: tuple[str, ...]) -> str:
    """The mean over draws and results."""
    errors = {} if row is None else row.value["answer"]["errors"]
    if not all(errors.get(name) for name in results):
        return "-"
    return f"{mean(mean(errors[name]) for name in results):.3e}"


def long_accuracy() -> Table:
    words = {"last": "of the last 8,192", "random": "from anywhere"}
    rows = newest_rows("h200-accuracy", "quorum")
    lines = []
    for sample, text in words.items():
        row = rows[f"{sample} of {1 << 20}"]
        for method, errors in row.value.items():
            cells = [f"{error:.2e}" for error in errors]
            lines.append(Line([text, METHODS.get(method, method), *cells], [row]))
    return Table(["rows", "method", "out", "dQ", "dK", "dV"], lines)


def census() -> Table:
    lines = []
    for row in PAPER["census"]["rows"]:
        tokens = row["tokens"]
        levels = tuple(row["levels"])
        balanced = count_tiles(tokens, levels, "balanced")
        aligned = count_tiles(tokens, levels, "aligned")
        theirs = ["-" if share is None else f"{share:.3g}" for share in row["percent"]]
        cells = [
            f"{tokens:,}",
            " x ".join(map(str, levels)),
            " / ".join(theirs),
            " / ".join(f"{share:.3g}" for share in balanced),
            f"{aligned[-1]:.3g}",
        ]
        lines.append(Line(cells))
    columns = [
        "tokens",
        "chunks",
        "paper",
        "ours, the paper's layout",
        "mixed, our own layout",
    ]
    return Table(columns, lines)


def count_tiles(tokens: int, levels: tuple[int, ...], layout: Any) -> list[float]:
    """Per cent of the tiles of causal tasks that are masked, clear and mixed."""
    decomposition = Decomposition(tokens, levels, layout=layout)
    counted = census_of(decomposition.tasks(), Pairs(tokens, tokens, True))
    return [100 * share for share in (counted.masked, counted.clear, counted.mixed)]


def wrapped() -> Table:
    theirs = PAPER["wrapped"]
    rows = newest_rows("h200-wrapped", "dQ")
    lines = []
    for kernel, errors in theirs["rows"].items():
        cells = [kernel, *(f"{error:.1e}" for error in errors)]
        row = rows.get(kernel)
        if row is None:
            lines.append(Line([*cells, "", "", "", ""]))
            continue
        for name in ("dQ", "dK", "dV"):
            largest = max(largest for largest, _ in row.value[name])
            cells.append(f"{largest:.1e}")
        cells.append(str(len(row.value["dQ"])))
        lines.append(Line(cells, [row]))
    sources = ("paper", "ours")
    columns = [
        f"{source}: {name}" for source, name in product(sources, ("dQ", "dK", "dV"))
    ]
    return Table(["kernel", *columns, "ours: draws and depths"], lines)
