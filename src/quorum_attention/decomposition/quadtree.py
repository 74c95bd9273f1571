"""Cuts blocks of pairs into quarters again and again, wherever their verdict is mixed."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.pairs import Ranges
from quorum_attention.decomposition.verdicts import Verdict

Node = TypeVar("Node")


def walk(
    root: Node,
    verdict: Callable[[Node], Verdict],
    parts: Callable[[Node, Verdict], Sequence[Node]],
    *,
    by_level: bool = False,
) -> Iterator[tuple[Node, Verdict]]:
    """The leaves of a tree (nodes that are cut no further), with their verdicts.

    Args:
        root: where the walk begins.
        verdict: a node's verdict. It is asked only after all earlier leaves have been yielded, so
            it may depend on what the caller did with them.
        parts: what a node is cut into, given its verdict; nothing makes it a leaf.
        by_level: all nodes of one level before those of the next; else the parts of a node take
            its place in the order.
    """
    waiting = deque([root])
    while waiting:
        node = waiting.popleft()
        found = verdict(node)
        finer = parts(node, found)
        if not finer:
            yield node, found
        elif by_level:
            waiting.extend(finer)
        else:
            waiting.extendleft(reversed(finer))


def quarters(block: Ranges, unit: int = 1) -> list[Ranges]:
    """``block`` cut in the middle of both sides, at multiples of ``unit``.

    A side with no such multiple inside it stays whole; if both have none, nothing is returned.
    """
    queries, keys = block
    rows, columns = halves(queries, unit), halves(keys, unit)
    if rows and columns:
        (upper, lower), (left, right) = rows, columns
        # A named tuple's own constructor takes twice as long, and this is most of a walk.
        sides = (upper, left), (upper, right), (lower, left), (lower, right)
        return [tuple.__new__(Ranges, each) for each in sides]
    if rows:
        return [Ranges(row, keys) for row in rows]
    return [Ranges(queries, column) for column in columns]


def halves(one: Interval, unit: int = 1) -> tuple[Interval, ...]:
    """``one`` cut at the middle multiple of ``unit`` inside it; nothing if it has none."""
    start, stop = one
    first, last = start // unit, (stop - 1) // unit
    if first == last:
        return ()
    middle = (first + last + 2) // 2 * unit
    return tuple.__new__(Interval, (start, middle)), tuple.__new__(Interval, (middle, stop))
