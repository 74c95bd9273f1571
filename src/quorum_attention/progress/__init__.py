"""Progress on stderr or in a notebook, by rich; plain lines where nothing can be redrawn."""

from quorum_attention.progress.bars import Status, progress_bar, status_line

__all__ = ["Status", "progress_bar", "status_line"]
