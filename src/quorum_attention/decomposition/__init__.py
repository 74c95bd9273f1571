"""Chunks into tasks, spans, group bits and rectangles. Plain integers, no torch."""

from quorum_attention.decomposition.census import Census, census
from quorum_attention.decomposition.decomposition import (
    Decomposition,
    Layout,
    Span,
    Task,
)
from quorum_attention.decomposition.intervals import Interval, Rows
from quorum_attention.decomposition.pairs import (
    EMPTY,
    FULL,
    PARTIAL,
    Pairs,
    Ranges,
    Verdict,
)
from quorum_attention.decomposition.rectangles import Rectangle

__all__ = [
    "EMPTY",
    "FULL",
    "PARTIAL",
    "Census",
    "Decomposition",
    "Interval",
    "Layout",
    "Pairs",
    "Ranges",
    "Rectangle",
    "Rows",
    "Span",
    "Task",
    "Verdict",
    "census",
]
