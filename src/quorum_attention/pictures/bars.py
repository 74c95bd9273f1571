"""Bars of memory and of time: a recovery, a report, and what ran where and when."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from os import PathLike
from typing import Any

from quorum_attention.decomposition import Decomposition, Pairs
from quorum_attention.pictures.canvas import (
    INK,
    MASKED,
    PAPER,
    SOFT,
    Colour,
    bare,
    explain,
    headed,
    hue,
    new_figure,
    own_style,
    save,
)
from quorum_attention.pictures.coverage import square, summary
from quorum_attention.sizes import format_bytes, format_seconds

_FITS, _OVER = hue(0.35), (0.86, 0.36, 0.3)
# (device number, part number, start, stop), seconds.
Bar = tuple[int, int, float, float]


def _bars(
    axes: Any, bars: Sequence[tuple[str, float, Colour | str, str]], most: float = 0.0
) -> None:
    """Horizontal bars from top to bottom: (label, length, colour, note)."""
    bare(axes)
    axes.set_xlim(0, max([most, *(size for _, size, _, _ in bars), 1e-9]) * 1.02)
    axes.set_ylim(max(3, len(bars)) - 0.4, -0.6)
    behind = {"facecolor": PAPER, "edgecolor": "none", "pad": 1.5}
    for place, (label, size, colour, note) in enumerate(bars):
        axes.barh(place, size, height=0.34, color=[colour], zorder=2)
        for below, text, ink, points in ((-0.31, label, INK, 10.5), (0.29, note, SOFT, 9.5)):
            axes.text(
                0, place + below, text, color=ink, size=points, va="center", zorder=4, bbox=behind
            )


@own_style()
def draw_recovery(
    path: str | PathLike[str],
    *,
    decomposition: Decomposition,
    is_causal: bool,
    budget_bytes: int,
    bars: Sequence[tuple[str, int, str, bool]],
) -> None:
    """Write a picture of a recovery: the coverage on the left, bars of memory on the right.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        decomposition, is_causal: what the coverage shows.
        budget_bytes: drawn as a line across the bars.
        bars: (label, bytes, note, whether it ran within the budget), from top to bottom; those
            that did not are red.

    Raises:
        ImportError: matplotlib is not installed.
    """
    figure = new_figure(12.4, 7.5)
    pairs = Pairs(decomposition.n_tokens, decomposition.n_tokens, is_causal)
    square(figure, decomposition, pairs, summary(decomposition, "causal" if is_causal else ""))
    right = figure.add_axes((0.545, 0.18, 0.42, 0.675))
    drawn = [
        (f"{label}: {format_bytes(size)}", size, _FITS if ran else _OVER, note)
        for label, size, note, ran in bars
    ]
    _bars(right, drawn, budget_bytes)
    right.axvline(budget_bytes, color=INK, linewidth=1.4, linestyle=(0, (4, 3)), zorder=3)
    headed(right, f"Memory of the same call; budget {format_bytes(budget_bytes)}")
    explain(
        figure, 0.545, 0.098, 80,
        "Most memory that each method had at once, beyond what was there before the call. "
        "Green ran inside the budget (the dashed line), red did not, or would not.",
    )  # fmt: skip
    save(figure, path)


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
    inches = 3.4 * len(passes) + 0.95
    figure = new_figure(12.4, inches)
    height = 3.4 / inches
    for row, (name, part) in enumerate(passes):
        bottom = 1 - (row + 1) * height
        title = _title(name, part)
        figure.text(0.03, bottom + 0.92 * height, title, color=INK, size=12.5, weight="bold")
        places = ((0.03, 0.57), (0.66, 0.31))
        left, right = (
            figure.add_axes((x, bottom + 0.06 * height, width, 0.8 * height)) for x, width in places
        )
        stages = {stage: spent for stage, spent in part["stages"].items() if spent > 0}
        bars: list[tuple[str, float, Colour | str, str]] = [
            (f"wall clock {format_seconds(part['seconds'])}", part["seconds"], INK, "")
        ]
        bars += [
            (f"{stage} {format_seconds(spent)}", spent, hue(number / 6, 0.7), "")
            for number, (stage, spent) in enumerate(stages.items())
        ]
        if part.get("overlap") is not None:
            bars[0] = (f"{bars[0][0]}; {part['overlap']:.0%} of the transfers hidden", *bars[0][1:])
        if not stages:
            note = "stages are not timed in a monolithic call or without events"
            bars[0] = (*bars[0][:3], note)
        _bars(left, bars)
        sizes = (
            ("measured peak of memory", part["peak_bytes"], _FITS),
            ("planned peak of memory", part["planned_peak_bytes"], "#c3c8ce"),
            ("budget", part["budget_bytes"], MASKED),
        )
        known = [(f"{n} {format_bytes(b)}", b, c, "") for n, b, c in sizes if b is not None]
        _bars(right, known)
    explain(
        figure, 0.03, 0.8 / inches, 160,
        "gather, h2d: a task's rows are collected and copied to the device. compute: calls of the "
        "attention kernel. merge: their results are joined to those of other tasks. d2h, scatter: "
        "results are copied back to their places. Stages run beside each other, so together they "
        "may take longer than the clock on the wall. Memory is beyond what was there before.",
    )  # fmt: skip
    save(figure, path)


def _title(name: str, part: Mapping[str, Any]) -> str:
    levels = " x ".join(map(str, part["levels"]))
    cut = f"cut into {levels} chunks" if part["levels"] else "not cut"
    plural = "" if part["units"] == 1 else "s"
    title = f"{name}: {cut}, {part['units']} unit{plural} of work, kernel {part['kernel']}"
    if part["recoveries"]:
        title += f", {len(part['recoveries'])} times recovered from running out of memory"
    return title


@own_style()
def draw_gantt(
    path: str | PathLike[str], passes: Mapping[str, tuple[Sequence[str], Sequence[Bar]]]
) -> None:
    """Write a picture with a chart for each pass, one above the other on the same scale of time.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        passes: by title, names of the devices, and a bar for each part that ran.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing ran.
    """
    end = max((bar[3] for _, bars in passes.values() for bar in bars), default=0.0)
    if not end:
        raise ValueError("passes: nothing ran, so there is nothing to draw")
    rows = [len(names) for names, _ in passes.values()]
    # In heights of a bar: a title above each chart, and its axis below.
    total = sum(n + 3.2 for n in rows) + 1.9
    figure = new_figure(11.0, 0.26 * total)
    top = 1.0
    for (title, (names, bars)), n in zip(passes.items(), rows, strict=True):
        axes = figure.add_axes((0.17, top - (n + 1.4) / total, 0.8, n / total))
        top -= (n + 3.2) / total
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        count = max((bar[1] for bar in bars), default=0) + 1
        for device, part, start, stop in bars:
            axes.barh(device, stop - start, left=start, height=0.72, color=[hue(part / count)])
        last = max((bar[3] for bar in bars), default=0.0)
        axes.axvline(last, color=INK, lw=1)
        axes.set_xlim(0, end * 1.02)
        axes.set_ylim(n - 0.4, -0.6)
        axes.set_yticks(range(n), names, fontsize=8, color=INK)
        axes.tick_params(length=0, labelcolor=INK, labelsize=8)
        axes.set_xlabel("seconds", fontsize=8, color=SOFT)
        text = f"{title}: {format_seconds(last)}"
        axes.set_title(text, loc="left", fontsize=10, color=INK, weight="bold")
    explain(
        figure, 0.17, 1.6 / total, 125,
        "Each piece is one part of the call (some of its heads, or of their rows), on the device "
        "that took it when it was free; colours tell parts apart. The line: all parts are done.",
    )  # fmt: skip
    save(figure, path)
