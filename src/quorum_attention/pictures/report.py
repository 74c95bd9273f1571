"""A picture of a report: wall-clock time, device time by stage, and memory against the budget."""

from __future__ import annotations

from collections.abc import Mapping
from math import pi
from os import PathLike
from typing import Any

from quorum_attention.pictures.canvas import INK, SOFT, bare, explain, new_figure, own_style, save
from quorum_attention.pictures.colours import oklch
from quorum_attention.sizes import format_bytes, format_seconds

_WALL = "#22262b"
# Inches at the bottom for what the words mean.
_FOOT = 0.95
_WORDS = (
    "gather, h2d: a task's rows are collected and copied to the device. compute: calls of the "
    "attention kernel. merge: their results are joined to those of other tasks. d2h, scatter: "
    "results are copied back to their places. Stages run beside each other, so together they may "
    "take longer than the clock on the wall. Memory is beyond what was there before the call."
)
_LIMITS = {"measured": oklch(0.72, 0.125, 2.75), "planned": "#c3c8ce", "budget": "#e6e8eb"}


@own_style()
def draw_report(path: str | PathLike[str], report: Mapping[str, Any]) -> None:
    """Write a picture of ``Report.to_dict()``: a row for every pass that has run.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        report: ``forward`` and ``backward``: the fields of a ``PassReport`` each, or None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing has run yet.
    """
    passes = [(name, part) for name, part in report.items() if part is not None]
    if not passes:
        raise ValueError("report: nothing has run yet, so there is nothing to draw")
    inches = 2.5 * len(passes) + _FOOT
    figure = new_figure(12.4, inches)
    height = 2.5 / inches
    for row, (name, part) in enumerate(passes):
        bottom = 1 - (row + 1) * height
        left = figure.add_axes((0.03, bottom + 0.1 * height, 0.57, 0.68 * height))
        right = figure.add_axes((0.66, bottom + 0.1 * height, 0.31, 0.68 * height))
        figure.text(
            0.03, bottom + 0.9 * height, _title(name, part), color=INK, size=12.5, weight="bold"
        )
        _draw_stages(left, part)
        _draw_memory(right, part)
    explain(figure, 0.03, (_FOOT - 0.15) / inches, 160, _WORDS)
    save(figure, path)


def _title(name: str, part: Mapping[str, Any]) -> str:
    levels = " x ".join(map(str, part["levels"]))
    cut = f"cut into {levels} chunks" if part["levels"] else "not cut"
    plural = "" if part["units"] == 1 else "s"
    title = f"{name}: {cut}, {part['units']} unit{plural} of work, kernel {part['kernel']}"
    if part["recoveries"]:
        title += f", {len(part['recoveries'])} times recovered from running out of memory"
    return title


def _draw_stages(axes: Any, part: Mapping[str, Any]) -> None:
    """The wall-clock time, and below it the stages; they overlap, so their sum may be longer."""
    bare(axes)
    stages = {stage: spent for stage, spent in part["stages"].items() if spent > 0}
    axes.set_xlim(0, max(part["seconds"], sum(stages.values()), 1e-9) * 1.01)
    axes.set_ylim(1.85, -0.75)
    axes.barh(0, part["seconds"], height=0.32, color=[_WALL])
    axes.text(
        0, -0.42, f"wall clock {format_seconds(part['seconds'])}", color=INK, size=10.5, va="center"
    )
    start = place = 0.0
    for number, stage in enumerate(part["stages"]):
        spent = stages.get(stage, 0.0)
        colour = oklch(0.74, 0.11, 2 * pi * number / 6 + 0.6)
        axes.barh(1.0, spent, left=start, height=0.32, color=[colour])
        words = f"■ {stage} {format_seconds(spent)}"
        axes.text(
            place, 1.55, words, color=colour, size=8.7, va="center",
            transform=axes.get_yaxis_transform(),
        )  # fmt: skip
        place += 0.0108 * (len(words) + 2)
        start += spent
    words = "time by stage, on the device"
    if part.get("overlap") is not None:
        words += f"; {part['overlap']:.0%} of the transfers hidden"
    if not stages:
        words = "stages are not timed in a monolithic call or without events"
    axes.text(0, 0.58, words, color=SOFT, size=10, va="center")


def _draw_memory(axes: Any, part: Mapping[str, Any]) -> None:
    bare(axes)
    sizes = {
        "measured": part["peak_bytes"],
        "planned": part["planned_peak_bytes"],
        "budget": part["budget_bytes"],
    }
    known = {label: size for label, size in sizes.items() if size is not None}
    axes.set_xlim(0, max(1, *known.values()) * 1.01)
    axes.set_ylim(2.1, -0.75)
    for place, (label, size) in enumerate(known.items()):
        axes.barh(0.9 * place, size, height=0.32, color=[_LIMITS[label]])
        words = f"{label} {'peak of memory ' if label != 'budget' else ''}{format_bytes(size)}"
        axes.text(0, 0.9 * place - 0.4, words, color=INK, size=10, va="center")
