"""Pictures of a decomposition and of a recovery; matplotlib is loaded when one is drawn."""

from quorum_attention.pictures.coverage import draw_coverage
from quorum_attention.pictures.recovery import draw_recovery

__all__ = ["draw_coverage", "draw_recovery"]
