"""Chunks into tasks, spans, group bits and rectangles. Plain integers, no torch."""

from quorum_attention.decomposition.census import Census, census
from quorum_attention.decomposition.decomposition import Decomposition, Layout
from quorum_attention.decomposition.pairs import Pairs, Ranges, Verdict
from quorum_attention.decomposition.rectangles import Rectangle
from quorum_attention.decomposition.tasks import Span, Task

__all__ = [
    "Census",
    "Decomposition",
    "Layout",
    "Pairs",
    "Ranges",
    "Rectangle",
    "Span",
    "Task",
    "Verdict",
    "census",
]
