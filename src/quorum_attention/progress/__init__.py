"""Progress on stderr or in a notebook, by rich; plain lines where nothing can be
redrawn."""

from quorum_attention.progress.bars import load_bars, progress_bar

__all__ = ["load_bars", "progress_bar"]
