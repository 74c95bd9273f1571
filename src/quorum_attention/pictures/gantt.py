"""The picture of a call on several devices: what ran where and when."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from os import PathLike
from typing import Any

from quorum_attention.pictures.figures import (
    INK,
    SOFT,
    colour_at,
    fixed_style,
    new_figure,
    save,
)
from quorum_attention.units import format_seconds

_WIDTH = 11.0
_ROW_HEIGHT = 0.26
# The title of a chart and the explanation below all charts, in rows.
_TITLE_ROWS = 3.2
_TEXT_ROWS = 1.9
_COLUMNS = 125
_EXPLANATION = (
    "Seconds. Each bar is one part of the call (some of its heads, or of their rows), "
    "on the device that computed it; colours only separate parts. The vertical line: "
    "all parts are done."
)


@fixed_style()
def draw_gantt(path: str | PathLike[str], passes: Mapping[str, Any]) -> None:
    """Write a picture with a chart for each pass, one above the other on the same scale
    of time.

    Args:
        path: the file; its ending is the format (.png, .svg, .pdf).
        passes: a ``PoolPass`` each, by title.

    Raises:
        ImportError: matplotlib is not installed.
        ValueError: nothing ran.
    """
    if not any(pool_pass.ran for pool_pass in passes.values()):
        raise ValueError("passes: nothing ran, so there is nothing to draw")
    n_devices = [len(pool_pass.devices) for pool_pass in passes.values()]
    n_rows = sum(n_devices) + _TITLE_ROWS * len(passes) + _TEXT_ROWS
    figure = new_figure(_WIDTH, _ROW_HEIGHT * n_rows)
    figure.set_layout_engine("constrained")
    charts = figure.subplots(
        len(passes), squeeze=False, sharex=True, height_ratios=n_devices
    )
    for axes, (title, pool_pass) in zip(charts[:, 0], passes.items(), strict=True):
        _draw_pass(axes, title, pool_pass)
    text = textwrap.fill(_EXPLANATION, _COLUMNS)
    figure.supxlabel(text, color=SOFT, size=9.5)
    save(figure, path)


def _draw_pass(axes: Any, title: str, pool_pass: Any) -> None:
    """Draw the parts of a pass on their devices."""
    axes.spines[["top", "right", "left"]].set_visible(False)
    for part in pool_pass.ran:
        colour = colour_at(part.index / pool_pass.parts)
        seconds = part.stop - part.start
        axes.barh(
            part.device,
            seconds,
            left=part.start,
            height=0.72,
            color=[colour],
        )
    stops = [part.stop for part in pool_pass.ran]
    last_stop = max(stops, default=0.0)
    axes.axvline(last_stop, color=INK, lw=1)
    n_devices = len(pool_pass.devices)
    axes.set_ylim(n_devices - 0.4, -0.6)
    axes.set_yticks(range(n_devices), pool_pass.devices)
    axes.tick_params(length=0, labelcolor=INK, labelsize=8)
    text = f"{title}: {format_seconds(last_stop)}"
    axes.set_title(
        text,
        loc="left",
        fontsize=10,
        color=INK,
        weight="bold",
    )
