"""Pictures of a decomposition, a recovery and a report; matplotlib is loaded when one
is drawn."""

from quorum_attention.pictures.coverage import draw_coverage
from quorum_attention.pictures.figures import check_drawable
from quorum_attention.pictures.gantt import draw_gantt
from quorum_attention.pictures.recovery import draw_recovery
from quorum_attention.pictures.report import draw_report

__all__ = [
    "check_drawable",
    "draw_coverage",
    "draw_gantt",
    "draw_recovery",
    "draw_report",
]
