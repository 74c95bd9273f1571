"""The picture of a report: where the time and the memory of each pass went."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from typing import Any

from quorum_attention.pictures.bars import Bar, draw_bars
from quorum_attention.pictures.figures import (
    INK,
    MASKED,
    colour_at,
    fixed_style,
    new_figure,
    save,
    write_explanation,
)
from quorum_attention.units import counted, format_bytes, format_seconds

_MEASURED = colour_at(0.35)
_PLANNED = "#c3c8ce"
_WIDTH = 12.4
# Inches of the row of a pass, and of the explanation.
_ROW_HEIGHT = 3.4
_TEXT_HEIGHT = 0.95
_COLUMNS = 160
_HUES_OF_STAGES = 6
_EXPLANATION = (
    "gather, h2d: a task's rows are collected and copied to the device. compute: "
    "calls of the attention kernel. merge: results are merged with those of other "
    "tasks. d2h, scatter: results are copied back to their places. Stages overlap, so "
    "their sum may exceed the wall-clock time. Memory is beyond what was allocated "
    "before."
)


@fixed_style()
def draw_report(path: str | PathLike[str], report: Mapping[str, Any]) -> None:
    """Write a picture of ``Report.to_dict()``: a row for every pass that has run.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        report: ``forward`` and ``backward``: the fields of a ``PassReport`` each, or
            None.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing has run yet.
    """
    passes = {name: fields for name, fields in report.items() if fields is not None}
    if not passes:
        raise ValueError("report: nothing has run yet, so there is nothing to draw")
    inches = _ROW_HEIGHT * len(passes) + _TEXT_HEIGHT
    figure = new_figure(_WIDTH, inches)
    height = _ROW_HEIGHT / inches
    bottom = 1.0
    for name, fields in passes.items():
        bottom -= height
        title = _title(name, fields)
        title_bottom = bottom + 0.92 * height
        axes_bottom = bottom + 0.06 * height
        axes_height = 0.8 * height
        figure.text(
            0.03,
            title_bottom,
            title,
            color=INK,
            size=12.5,
            weight="bold",
        )
        left_axes = figure.add_axes((0.03, axes_bottom, 0.57, axes_height))
        right_axes = figure.add_axes((0.66, axes_bottom, 0.31, axes_height))
        draw_bars(left_axes, _time_bars(fields))
        draw_bars(right_axes, _memory_bars(fields))
    write_explanation(figure, 0.03, 0.8 / inches, _COLUMNS, _EXPLANATION)
    save(figure, path)


def _time_bars(fields: Mapping[str, Any]) -> list[Bar]:
    """The time of a pass, and of each of its stages that took any."""
    stages = {
        stage: seconds for stage, seconds in fields["stages"].items() if seconds > 0
    }
    seconds = fields["seconds"]
    overlap = fields.get("overlap")
    clock = f"wall clock {format_seconds(seconds)}"
    if overlap is not None:
        clock += f"; {overlap:.0%} of the transfers hidden"
    note = "" if stages else "stages are not timed in an uncut call or without events"
    bars = [Bar(clock, seconds, INK, note)]
    for number, (stage, stage_seconds) in enumerate(stages.items()):
        colour = colour_at(number / _HUES_OF_STAGES, 0.7)
        label = f"{stage} {format_seconds(stage_seconds)}"
        bars.append(Bar(label, stage_seconds, colour))
    return bars


def _memory_bars(fields: Mapping[str, Any]) -> list[Bar]:
    """The measured and planned peaks of a pass and its budget, as far as they are
    known."""
    bars = []
    for label, field, colour in (
        ("measured peak of memory", "peak_bytes", _MEASURED),
        ("planned peak of memory", "planned_peak_bytes", _PLANNED),
        ("budget", "budget_bytes", MASKED),
    ):
        n_bytes = fields[field]
        if n_bytes is not None:
            bars.append(Bar(f"{label} {format_bytes(n_bytes)}", n_bytes, colour))
    return bars


def _title(name: str, fields: Mapping[str, Any]) -> str:
    levels = " x ".join(map(str, fields["levels"]))
    cut = f"cut into {levels} chunks" if levels else "not cut"
    units = counted(fields["units"], "unit")
    title = f"{name}: {cut}, {units} of work, kernel {fields['kernel']}"
    if not fields["recoveries"]:
        return title
    times = counted(len(fields["recoveries"]), "time")
    return f"{title}, {times} recovered from running out of memory"
