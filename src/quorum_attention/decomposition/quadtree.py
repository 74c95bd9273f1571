"""Blocks of pairs by halves of halves: what is masked or clear is known whole, and only the border
between the two is cut further."""

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
    """Every node that is cut no further, with its verdict.

    Args:
        verdict: of a node. It is asked when the nodes before have come out, and may depend on what
            has been done about them.
        parts: of a node, given its verdict, what it is cut into; nothing where it is settled.
        by_level: larger nodes before smaller ones; else the parts of a node in its place.
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
    """``block`` cut in the middle of both sides, at multiples of ``unit``; by one side alone where
    the other reaches across none, and nothing where neither does."""
    queries, keys = block
    rows, columns = halves(queries, unit), halves(keys, unit)
    if rows and columns:
        (upper, lower), (left, right) = rows, columns
        return [
            Ranges(upper, left), Ranges(upper, right), Ranges(lower, left), Ranges(lower, right),
        ]  # fmt: skip
    if rows:
        return [Ranges(row, keys) for row in rows]
    return [Ranges(queries, column) for column in columns]


def halves(one: Interval, unit: int = 1) -> tuple[Interval, ...]:
    """``one`` cut at the middle one of the multiples of ``unit`` inside it; nothing without any."""
    start, stop = one
    first, last = start // unit, (stop - 1) // unit
    if first == last:
        return ()
    middle = (first + last + 2) // 2 * unit
    return Interval(start, middle), Interval(middle, stop)
