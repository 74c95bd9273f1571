"""Pictures of a decomposition, a recovery and a report; matplotlib is loaded when one is drawn."""

from quorum_attention.pictures.bars import draw_gantt, draw_recovery, draw_report
from quorum_attention.pictures.canvas import check_drawable
from quorum_attention.pictures.coverage import coverage_svg, draw_coverage

__all__ = [
    "check_drawable", "coverage_svg", "draw_coverage", "draw_gantt", "draw_recovery", "draw_report",
]  # fmt: skip
