"""The picture of a training step: memory and seconds over length, each way."""

from __future__ import annotations

import argparse
from typing import Any

from cases.step import WAYS
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(rows: dict[str, dict[str, Any]], options: argparse.Namespace) -> None:
    """Draw what ``longest`` measured into the file ``options.plot``."""
    memory = options.memory / 2**30
    figure = Figure(figsize=(11, 4.5), layout="constrained")
    peaks, seconds = figure.subplots(1, 2)
    for way, row in zip(options.ways.split(","), rows.values(), strict=True):
        draw_way(peaks, seconds, way, row, memory)
    peaks.axhline(memory, color="black", linewidth=0.8)
    for axes in (peaks, seconds):
        scale_axes(axes)
    peaks.set(
        ylim=(None, memory * 1.5),
        ylabel="memory of a step, GiB",
        title=f"{options.shape}'s shape, random weights (dotted: by the line, not run)",
    )
    seconds.set(ylabel="seconds of a step, by layer")
    figure.legend(loc="outside lower center", ncols=4)
    figure.savefig(options.plot, dpi=150)


def draw_way(
    peaks: Axes, seconds: Axes, way: str, row: dict[str, Any], memory: float
) -> None:
    points = sorted(row["points"], key=lambda point: point["tokens"])
    tokens = [point["tokens"] for point in points]
    sizes = [point["peak"] / 2**30 for point in points]
    # The first two ways lie on each other: one is broad.
    style: dict[str, Any] = {"linewidth": 1.5}
    if way == "sdpa":
        style = {"linewidth": 6, "alpha": 0.4}
    (line,) = peaks.plot(tokens, sizes, "o-", label=WAYS[way], **style)
    layer_seconds = [point["seconds"] / row["layers"] for point in points]
    seconds.plot(tokens, layer_seconds, "o-", **style)
    longest = row["tokens"]
    if longest > tokens[-1]:
        colour = line.get_color()
        peaks.plot([tokens[-1], longest], [sizes[-1], memory], ":", color=colour)
    if way != "attention":
        side = "right" if way == "remedies" else "center"
        place = (longest, memory * 1.05)
        peaks.annotate(f"{longest:,}", place, ha=side)


def scale_axes(axes: Axes) -> None:
    """Both axes by powers of two."""
    axes.set_xscale("log", base=2)
    axes.set_yscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda tokens, _: f"{tokens / 1024:g}K")
    axes.yaxis.set_major_formatter(lambda size, _: f"{size:g}")
    axes.set_xlabel("tokens of one text")
