"""The table of calls on several devices, and of sequences sharded over ranks."""

from __future__ import annotations

from statistics import median
from typing import Any

from measure import locked_calls, medians
from runs import Row, newest_rows
from table_text import Line, Table, mib

from quorum_attention.units import parse_bytes

CALLS = {
    "1048576": "1,048,576 tokens, 8 heads of 64, fp16",
    "131072": "131,072 tokens, 32 heads over 8 of 128, bf16",
    "2048-a-gpu-x8": "2,048 tokens a rank, 64 heads over 8 of 128, bf16, eight calls in a row",
    "8192-a-gpu-x8": "8,192 tokens a rank, 64 heads over 8 of 128, bf16, eight calls in a row",
}
WAYS = ("ours", "fa4 exchange", "cudnn ring")


def several() -> Table:
    """A call on several devices."""
    rows = newest_rows("h200-devices", "all")
    lines = []
    for name in sorted(rows, key=devices_then_budget):
        devices, budget = name.split(", ")
        figures = rows[name].value
        all_seconds = call_seconds(figures["all"])
        one_seconds = call_seconds(figures["one"])
        seconds = "; ".join(f"{part:.3g}" for part in all_seconds)
        speedup = "; ".join(
            f"{one / several:.2f}"
            for one, several in zip(one_seconds, all_seconds, strict=True)
        )
        cells = [devices.split(" ")[0], mib(parse_bytes(budget)), seconds, speedup]
        lines.append(Line(cells, [rows[name]]))
    columns = [
        "devices",
        "budget of each, MiB",
        "seconds",
        "times as fast as one device",
    ]
    return Table(columns, lines)


def call_seconds(calls: list[list[float]]) -> tuple[float, float]:
    """Medians of the forward, and of the forward and its backward, of the calls that
    page-lock nothing."""
    forward, backward = medians(locked_calls(calls))
    return forward, forward + backward


def killed() -> Table:
    """A forward on several devices, one of which is lost at several moments."""
    lines = []
    for name, row in newest_rows("h200-devices", "over_ideal").items():
        devices, budget, _ = name.split(", ")
        cells = [
            devices.split(" ")[0],
            mib(parse_bytes(budget)),
            *over_ideal_cells(row.value["over_ideal"]),
        ]
        lines.append(Line(cells, [row]))
    columns = [
        "devices",
        "budget of each, MiB",
        "time over the least possible, median",
        "killed at a fifth; two; three; four fifths of the time",
    ]
    return Table(columns, lines)


def over_ideal_cells(ratios: Any) -> list[str]:
    """The median of the moments, and each of them. Old runs have one number, of half
    the time."""
    if isinstance(ratios, float):
        return [f"{ratios:.2f}", f"{ratios:.2f} (at half of it)"]
    return [f"{median(ratios):.2f}", "; ".join(f"{ratio:.2f}" for ratio in ratios)]


def ranks() -> Table:
    """A sequence sharded over ranks."""
    columns = [
        "ranks",
        "call",
        "seconds",
        "ours: times as fast",
        "exchange of heads: times as fast",
        "torch's ring: times as fast",
    ]
    return Table(columns, rank_lines())


def devices_then_budget(name: str) -> tuple[str, int]:
    """Few devices before many; large budgets before small ones."""
    devices, budget = name.split(", ")
    return devices, -parse_bytes(budget)


def rank_lines() -> list[Line]:
    by_way = {way: newest_rows("h200-ranks", "fa4", way) for way in WAYS}
    lines = []
    for n_ranks in (2, 4):
        for case, words in CALLS.items():
            name = f"{n_ranks} ranks, {case}"
            rows = [by_way[way][name] for way in WAYS if name in by_way[way]]
            if not rows:
                continue
            speedups = [speedup_cell(by_way[way].get(name), way) for way in WAYS]
            seconds = "; ".join(
                f"{part:.3g}" for part in by_way["ours"][name].value["ours"]
            )
            lines.append(Line([str(n_ranks), words, seconds, *speedups], rows))
    return lines


def speedup_cell(row: Row | None, way: str) -> str:
    """How many times as fast as FlashAttention-4 on one device in the same run."""
    if row is None:
        return "-"
    pairs = zip(row.value["fa4"], row.value[way], strict=True)
    return "; ".join(f"{one_device / ranks:.2f}" for one_device, ranks in pairs)
