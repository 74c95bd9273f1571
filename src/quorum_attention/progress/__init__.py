"""Progress on stderr or in a notebook, by rich; plain lines where nothing can be redrawn."""

from quorum_attention.progress.bars import progress_bar

__all__ = ["progress_bar"]
