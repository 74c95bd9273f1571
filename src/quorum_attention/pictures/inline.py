"""The picture of a coverage inside an HTML page, in the page's own colours."""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import replace

from quorum_attention.decomposition import Decomposition, Pairs, Task
from quorum_attention.pictures.canvas import INK, MASKED, PAPER, SOFT, own_style
from quorum_attention.pictures.coverage import coverage_figure
from quorum_attention.pictures.geometry import blocks, shallow

# More blocks than that would make a page slow; ``draw_coverage`` draws them to a file.
MOST_BLOCKS = 2000


@own_style()
def coverage_svg(
    decomposition: Decomposition,
    pairs: Pairs,
    *,
    tasks: Sequence[Task] | None = None,
    kept: str = "",
) -> str | None:
    """``draw_coverage`` as an <svg> element: text and empty cells take the page's colour, so it can
    be read on a light page and on a dark one. None: matplotlib cannot be imported, or the picture
    would have more than ``MOST_BLOCKS`` blocks."""
    drawn = shallow(decomposition, MOST_BLOCKS, pairs.is_causal)
    last = drawn.task(tuple(c - 1 for c in drawn.levels))
    each = sum(1 for _ in blocks(last, replace(pairs, verdict=None)))
    if each * drawn.n_tasks > MOST_BLOCKS:
        return None
    try:
        figure = coverage_figure(decomposition, pairs, tasks=tasks, kept=kept, limit=MOST_BLOCKS)
    except ImportError:  # it is not there, or does not fit the NumPy that is
        return None
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None})
    return _of_the_page(file.getvalue())


def _of_the_page(svg: str) -> str:
    """The <svg> element alone, with colours of the page it stands in."""
    svg = svg[svg.index("<svg") :].strip()
    # Its rules for every element would hold for the rest of the page too.
    svg = re.sub(r"<style[^>]*>.*?</style>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"', r"\1", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?)height="[^"]*"', r"\1", svg, count=1, flags=re.DOTALL)
    svg = re.sub(r'(<svg [^>]*?) width="[^"]*"', r"\1", svg, count=1, flags=re.DOTALL)
    svg = svg.replace(
        "<svg ",
        '<svg role="img" style="width:100%;max-width:62em;height:auto;stroke-linejoin:round;'
        'stroke-linecap:butt" ',
        1,
    )
    for colour, opacity in ((INK, 1), (SOFT, 0.7), (MASKED, 0.13)):
        for kind in ("fill", "stroke"):
            svg = svg.replace(
                f"{kind}: {colour}", f"{kind}: currentColor; {kind}-opacity: {opacity}"
            )
    return svg.replace(f"fill: {PAPER}", "fill: none")


__all__ = ["MOST_BLOCKS", "coverage_svg"]
