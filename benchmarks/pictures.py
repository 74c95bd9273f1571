"""The pictures of README, from raw files alone.

    python benchmarks/pictures.py            writes them into docs/images
    python benchmarks/pictures.py FOLDER     writes them there

What is drawn of this package was run on its present code: benchmarks/results has the
measurements.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator
from runs import Row, newest_rows, present_rows
from tables_of_prompts import WAYS as PROMPT_WAYS
from tables_of_prompts import out_of_memory_rows

IMAGES = Path(__file__).parents[1] / "docs" / "images"
GIB = 1 << 30
# Bytes of the whole H200, and of a card of 24 GiB.
WHOLE = 146_888_654_848
CARD = 24 * GIB
LONG_STEPS = ("262144", "393216", "524288")
PLAIN = "tab:blue"
OURS = "tab:red"
CARD_WAYS = {
    "sdpa": ("SDPA, as it comes", PLAIN),
    "remedies": ("SDPA, chunked loss, checkpoints in host memory", "tab:green"),
    "everything": ("long_context", OURS),
}


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else IMAGES
    for name, figure in figures().items():
        figure.savefig(folder / f"{name}.png", dpi=150)


def figures() -> dict[str, Figure]:
    """The pictures by name: those whose rows were measured on the present code."""
    made = {"train-long": steps(), "prompt-long": prompts()}
    return {name: figure for name, figure in made.items() if figure.axes}


def steps() -> Figure:
    """Memory of a training step by length, and the longest text on a small card: each
    if it was measured."""
    rows = present_rows("h200-step")
    panels: list[Callable[[Axes, dict[str, Row]], None]] = []
    long_names = [f"Qwen3-8B long {tokens}" for tokens in LONG_STEPS]
    if f"Qwen3-8B sdpa in {WHOLE}" in rows and any(map(rows.get, long_names)):
        panels.append(draw_whole_steps)
    if f"Qwen3-4B everything in {CARD}" in rows:
        panels.append(draw_longest)
    figure = Figure(figsize=(5.5 * max(len(panels), 1), 4.2), layout="constrained")
    for column, draw in enumerate(panels, start=1):
        draw(figure.add_subplot(1, len(panels), column), rows)
    return figure


def draw_whole_steps(axes: Axes, rows: dict[str, Row]) -> None:
    plain = rows[f"Qwen3-8B sdpa in {WHOLE}"].value["points"]
    draw_memory(axes, plain, "SDPA, as it comes", PLAIN)
    names = [f"Qwen3-8B long {tokens}" for tokens in LONG_STEPS]
    long = [rows[name].value for name in names if name in rows]
    ours = [
        {"tokens": step["tokens"], "peak": step["steps"][-1]["peak"]} for step in long
    ]
    draw_memory(axes, ours, "long_context", OURS)
    for point, step in zip(ours, long, strict=True):
        write_below(axes, point, f"{step['seconds']:.0f} s")
    draw_limit(axes, WHOLE)
    axes.set(
        title="A training step of Qwen3-8B's shape,\nLoRA, all 36 layers, one H200",
        xlabel="tokens of one text",
        ylabel="peak memory of the device, GiB",
        ylim=(0, WHOLE / GIB * 1.15),
        xlim=(3000, 1_600_000),
    )
    scale_tokens(axes)
    axes.legend(loc="lower center")


def draw_longest(axes: Axes, rows: dict[str, Row]) -> None:
    """Texts by way. SDPA is drawn from its newest run, of an older commit too: its
    steps are torch's and Transformers'."""
    rows = newest_rows("h200-step") | rows
    for place, (way, (label, colour)) in enumerate(CARD_WAYS.items()):
        row = rows[f"Qwen3-4B {way} in {CARD}"].value
        bar = axes.barh(place, row["tokens"], 0.4, color=colour)
        layers = f"{row['layers']} of {row['of_layers']} layers run"
        axes.bar_label(bar, [f"{row['tokens']:,}\n({layers})"], padding=4)
        axes.text(0, place - 0.42, f" {label}", va="bottom")
    axes.set(
        ylim=(len(CARD_WAYS) - 0.5, -0.6),
        title="The longest text of a training step in 24 GiB,\nQwen3-4B's shape, LoRA",
        xlabel="tokens of one text",
        xlim=(0, 820_000),
        yticks=[],
    )
    axes.xaxis.set_major_locator(MultipleLocator(128 * 1024))
    axes.xaxis.set_major_formatter(token_label)


def prompts() -> Figure:
    """Memory of a prompt by length, each way that was run."""
    figure = Figure(figsize=(8, 4.2), layout="constrained")
    axes = figure.subplots()
    for way, points in prompt_points().items():
        colour = {"ours": OURS, "sdpa": PLAIN}.get(way)
        draw_memory(axes, points, PROMPT_WAYS[way].replace("`", ""), colour)
        for point in points:
            if way == "ours":
                write_below(axes, point, f"{point['seconds']:.3g} s")
    draw_out_of_memory(axes)
    draw_limit(axes, CARD)
    axes.set(
        title="A prompt of Qwen3-4B's shape, all 36 layers, in 24 GiB\n"
        "(seconds: long_prompt, until the first token)",
        xlabel="tokens of the prompt",
        ylabel="peak memory of the device, GiB",
        ylim=(0, CARD / GIB * 1.15),
        xlim=(5500, 800_000),
    )
    scale_tokens(axes)
    axes.legend(loc="lower right")
    return figure


def prompt_points() -> dict[str, list[dict[str, Any]]]:
    """Length, memory and seconds by way, of all layers on a card of 24 GiB."""
    points: dict[str, list[dict[str, Any]]] = {}
    for name, row in present_rows("h200-prompt", "prefill_seconds").items():
        shape, tokens, memory, _, way = name.split(" ", 4)
        if (shape, memory) != ("Qwen3-4B", "24.00") or way not in PROMPT_WAYS:
            continue
        point = {
            "tokens": int(tokens),
            "peak": row.value["peak_bytes"],
            "seconds": row.value["prefill_seconds"],
        }
        points.setdefault(way, []).append(point)
    return points


def draw_out_of_memory(axes: Axes) -> None:
    """A cross at each length that did not fit."""
    lengths = []
    for name in out_of_memory_rows():
        shape, tokens, memory, _, way = name.split(" ", 4)
        if (shape, memory, way) == ("Qwen3-4B", "24.00", "sdpa"):
            lengths.append(int(tokens))
    limits = [CARD / GIB for _ in lengths]
    label = "SDPA: out of memory"
    axes.plot(lengths, limits, "x", color=PLAIN, markersize=9, label=label)


def draw_memory(
    axes: Axes, points: list[dict[str, Any]], label: str, colour: str | None
) -> None:
    ordered = sorted(points, key=lambda point: point["tokens"])
    tokens = [point["tokens"] for point in ordered]
    sizes = [point["peak"] / GIB for point in ordered]
    axes.plot(tokens, sizes, "o-", label=label, color=colour)


def draw_limit(axes: Axes, size: int) -> None:
    """A line at the memory that the device has."""
    axes.axhline(size / GIB, color="black", linewidth=0.8)
    axes.text(
        0.02,
        size / GIB * 1.01,
        "memory of the device",
        transform=axes.get_yaxis_transform(),
    )


def write_below(axes: Axes, point: dict[str, Any], label: str) -> None:
    place = (point["tokens"], point["peak"] / GIB)
    axes.annotate(
        label, place, (4, -8), textcoords="offset points", rotation=-60, va="top"
    )


def token_label(tokens: float, _: int | None) -> str:
    return f"{tokens / 1024:g}K" if tokens else "0"


def scale_tokens(axes: Axes) -> None:
    """Tokens by powers of two."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(token_label)


if __name__ == "__main__":
    main()
