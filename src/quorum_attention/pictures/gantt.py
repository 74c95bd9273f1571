"""A picture of what ran where and when, of a pool's report or of several side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import pi
from os import PathLike

from quorum_attention.pictures.canvas import INK, SOFT, explain, new_figure, own_style, save
from quorum_attention.pictures.colours import oklch
from quorum_attention.sizes import format_seconds

# (device number, part number, start, stop), seconds.
Bar = tuple[int, int, float, float]


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
        count = max((bar[1] for bar in bars), default=0) + 1
        for device, part, start, stop in bars:
            colour = oklch(0.74, 0.12, 2 * pi * part / count + 0.45)
            axes.barh(device, stop - start, left=start, height=0.72, color=[colour], lw=0)
        last = max((bar[3] for bar in bars), default=0.0)
        axes.axvline(last, color=INK, lw=1)
        axes.set_xlim(0, end * 1.02)
        axes.set_ylim(n - 0.4, -0.6)
        axes.set_yticks(range(n), names, fontsize=8, color=INK)
        axes.tick_params(length=0, labelcolor=INK, labelsize=8)
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        axes.spines["bottom"].set_color(SOFT)
        axes.set_title(
            f"{title}: {format_seconds(last)}", loc="left", fontsize=10, color=INK, weight="bold"
        )
        axes.set_xlabel("seconds", fontsize=8, color=SOFT)
    explain(
        figure, 0.17, 1.6 / total, 125,
        "Each piece is one part of the call (some of its heads, or of their rows), on the device "
        "that took it when it was free; colours tell parts apart. The line: all parts are done.",
    )  # fmt: skip
    save(figure, path)
