"""Cut a rectangle into smaller ones that cover the same pairs."""

from __future__ import annotations

from collections.abc import Iterator

from quorum_attention.decomposition import Rectangle


def cut_rectangle(rectangle: Rectangle, limit: int) -> Iterator[Rectangle]:
    """Yield rectangles of at most ``limit`` queries and keys that together are ``rectangle``."""
    q0, q1 = rectangle.query_start, rectangle.query_stop
    k0, k1 = rectangle.key_start, rectangle.key_stop
    if max(q1 - q0, k1 - k0) <= limit:
        yield rectangle
    elif rectangle.causal:
        middle = (q0 + q1) // 2
        yield from cut_rectangle(Rectangle(q0, middle, k0, middle, True), limit)
        yield from cut_rectangle(Rectangle(middle, q1, k0, middle), limit)
        yield from cut_rectangle(Rectangle(middle, q1, middle, k1, True), limit)
    elif q1 - q0 > limit:
        middle = (q0 + q1) // 2
        yield from cut_rectangle(Rectangle(q0, middle, k0, k1), limit)
        yield from cut_rectangle(Rectangle(middle, q1, k0, k1), limit)
    else:
        middle = (k0 + k1) // 2
        yield from cut_rectangle(Rectangle(q0, q1, k0, middle), limit)
        yield from cut_rectangle(Rectangle(q0, q1, middle, k1), limit)
