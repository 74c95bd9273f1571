"""Pictures of a decomposition, a recovery and a report; matplotlib is loaded when one is drawn."""

from quorum_attention.pictures.drawing import (
    check_drawable,
    draw_coverage,
    draw_gantt,
    draw_recovery,
    draw_report,
)

__all__ = [
    "check_drawable", "draw_coverage", "draw_gantt", "draw_recovery",
    "draw_report",
]  # fmt: skip
