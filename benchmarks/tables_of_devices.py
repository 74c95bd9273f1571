"""The table of calls on several devices, and of sequences sharded over ranks."""

from __future__ import annotations

from runs import Row, newest_rows
from table_text import Line, Table, later_seconds, ratio_cell

from quorum_attention.units import parse_bytes

CALLS = {
    "1048576": "1,048,576 tokens, 8 heads of 64, fp16",
    "131072": "131,072 tokens, 32 heads over 8 of 128, bf16",
    "8192-a-gpu-x8": "8,192 tokens a rank, 64 heads over 8 of 128, bf16, eight calls in a row",
}
WAYS = ("ours", "fa4 exchange", "cudnn ring")


def several() -> Table:
    """A call on several devices."""
    return Table(["on", "call", "seconds", "times one device"], device_lines())


def ranks() -> Table:
    """A sequence sharded over ranks."""
    columns = ["on", "call", "seconds", "ours", "exchange", "torch's ring"]
    return Table(columns, rank_lines())


def device_lines() -> list[Line]:
    rows = newest_rows("h200-devices", "all")
    lines = []
    for name in sorted(rows, key=devices_then_budget):
        devices, budget = name.split(", ")
        call = f"1,048,576 tokens from host memory, {budget} each"
        figures = rows[name].value
        speedup = ratio_cell(figures, "all", ours="one")
        seconds = "; ".join(f"{part:.3g}" for part in later_seconds(figures["all"]))
        lines.append(Line([devices, call, seconds, speedup], [rows[name]]))
    for name, row in newest_rows("h200-devices", "over_ideal").items():
        devices, budget, _ = name.split(", ")
        call = f"a forward in {budget} each, a worker killed in the middle (`--kill`)"
        lines.append(
            Line(
                [devices, call, "", f"{row.value['over_ideal']:.2f} times the ideal"],
                [row],
            )
        )
    return lines


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
            lines.append(Line([f"{n_ranks} ranks", words, seconds, *speedups], rows))
    return lines


def speedup_cell(row: Row | None, way: str) -> str:
    """How many times as fast as FlashAttention-4 on one device in the same run."""
    if row is None:
        return "-"
    pairs = zip(row.value["fa4"], row.value[way], strict=True)
    return "; ".join(f"{one_device / ranks:.2f}" for one_device, ranks in pairs)
