"""Progress on stderr or in a notebook: a bar with the time left where one can be drawn, plain lines
elsewhere."""

from quorum_attention.progress.bar import progress_bar
from quorum_attention.progress.status import Status, status_line

__all__ = ["Status", "progress_bar", "status_line"]
