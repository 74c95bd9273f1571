"""The pairs of queries and keys that a call keeps, told block by block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import IntEnum
from itertools import product
from typing import NamedTuple, TypeVar

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.intervals import Interval

Node = TypeVar("Node")

# ``kept_share`` cuts partial blocks until their sides are 1 / _FINEST of the call's
# longer side, or _BLOCK tokens, or until a level has more than _MAX_BLOCKS blocks.
_FINEST = 2048
_MAX_BLOCKS = 1 << 15
_BLOCK = 128
# The share of pairs that an empty, a full and a partial block are taken to keep.
_WEIGHT = (0.0, 1.0, 0.5)


class Verdict(IntEnum):
    """How many pairs of a block are kept. Arrays hold verdicts as these numbers."""

    EMPTY = 0
    """No pair is kept."""
    FULL = 1
    """Every pair is kept."""
    PARTIAL = 2
    """Some pairs are kept, or it is not known: each pair has to be asked about."""


# Module names, because looking up an attribute of an enumeration is slow.
EMPTY, FULL, PARTIAL = Verdict


def kept_by_both(a: Verdict, b: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by both of two masks."""
    if a is EMPTY or b is EMPTY:
        return EMPTY
    return FULL if a is b is FULL else PARTIAL


def kept_by_either(a: Verdict, b: Verdict) -> Verdict:
    """The verdict on pairs that have to be kept by at least one of two masks."""
    if a is FULL or b is FULL:
        return FULL
    return EMPTY if a is b is EMPTY else PARTIAL


class Ranges(NamedTuple):
    """A block of pairs: every query of one interval with every key of another; never
    empty."""

    queries: Interval
    keys: Interval

    @classmethod
    def from_bounds(
        cls, query_start: int, query_stop: int, key_start: int, key_stop: int
    ) -> Ranges:
        """Return the block with these bounds."""
        return cls(Interval(query_start, query_stop), Interval(key_start, key_stop))


@dataclass(frozen=True)
class Pairs:
    """The pairs that a call keeps. They do not depend on the tasks it is cut into.

    Attributes:
        n_queries, n_keys: of the call.
        is_causal: keep only keys at or before the query.
        verdict: the mask's answer for a block of positions, PARTIAL where it does not
            know; None is no mask. Its answers are cached, so they must never change.
        share: the share of pairs that the mask keeps, for predictions; None: to be
            found by asking ``verdict``. (A mask that keeps a thin pattern everywhere
            has to give it: all its blocks are PARTIAL.)
    """

    n_queries: int
    n_keys: int
    is_causal: bool
    verdict: Callable[[Ranges], Verdict] | None = None
    share: float | None = None

    @property
    def every_token_meets(self) -> bool:
        """Whether every token of every task has a kept pair: as many queries as keys,
        no mask."""
        return self.verdict is None and self.n_queries == self.n_keys

    def verdict_of(self, block: Ranges) -> Verdict:
        """Return the verdict on a block of positions, which may reach beyond the last
        token."""
        (q0, q1), (k0, k1) = block
        if q1 <= self.n_queries and k1 <= self.n_keys:
            return self._verdict_inside(block)
        q1 = min(q1, self.n_queries)
        k1 = min(k1, self.n_keys)
        if q0 >= q1 or k0 >= k1:
            return EMPTY
        inside = Ranges.from_bounds(q0, q1, k0, k1)
        verdict = self._verdict_inside(inside)
        return PARTIAL if verdict is FULL else verdict

    def _verdict_inside(self, block: Ranges) -> Verdict:
        """Return the verdict on a block that ends at the last token or before."""
        (q0, q1), (k0, k1) = block
        if self.is_causal and k0 >= q1:
            return EMPTY
        verdict = FULL if self.verdict is None else self.verdict(block)
        is_on_diagonal = self.is_causal and k1 - 1 > q0
        return PARTIAL if verdict is FULL and is_on_diagonal else verdict


def walk(
    root: Node,
    verdict: Callable[[Node], Verdict],
    parts: Callable[[Node], Sequence[Node]],
) -> Iterator[tuple[Node, Verdict]]:
    """The leaves of a tree (nodes that are cut no further), in order, with their
    verdicts.

    Args:
        verdict: a node's verdict. It is asked only after all earlier leaves have been
            yielded, so it may depend on what the caller did with them.
        parts: what a partial node is cut into; nothing makes it a leaf.
    """
    waiting = [root]
    while waiting:
        node = waiting.pop()
        node_verdict = verdict(node)
        finer = parts(node) if node_verdict is PARTIAL else ()
        if finer:
            waiting.extend(reversed(finer))
        else:
            yield node, node_verdict


def quarters(block: Ranges, unit: int = 1) -> list[Ranges]:
    """``block`` cut in the middle of both sides, at multiples of ``unit``.

    A side with no such multiple inside it stays whole; if both have none, nothing is
    returned.
    """
    rows = halves(block.queries, unit) or (block.queries,)
    columns = halves(block.keys, unit) or (block.keys,)
    if len(rows) == len(columns) == 1:
        return []
    # A named tuple's own constructor takes twice as long, and this is most of a walk.
    new = tuple.__new__
    return [new(Ranges, block) for block in product(rows, columns)]


def halves(interval: Interval, unit: int = 1) -> tuple[Interval, ...]:
    """``interval`` cut at the middle multiple of ``unit`` inside it; nothing if it has
    none."""
    start, stop = interval
    first = start // unit
    last = (stop - 1) // unit
    if first == last:
        return ()
    middle = (first + last + 2) // 2 * unit
    return tuple.__new__(Interval, (start, middle)), tuple.__new__(
        Interval, (middle, stop)
    )


def kept_share(pairs: Pairs) -> float:
    """Estimate the pairs that the mask keeps, over the pairs there are without it.

    The share is above 0 and at most 1; 1 without a mask. Blocks on the mask's border
    count half.
    """
    if pairs.verdict is None:
        return 1.0
    if pairs.share is not None:
        return _as_share(pairs.share)
    if not pairs.n_queries or not pairs.n_keys:
        return 1.0
    finest = max(_BLOCK, ceil_div(max(pairs.n_queries, pairs.n_keys), _FINEST))
    n_kept = 0.0
    n_all = 0.0
    # Blocks of one level, and whether the mask is known to keep none of their pairs.
    level = [(Ranges.from_bounds(0, pairs.n_queries, 0, pairs.n_keys), False)]
    may_cut = True
    while level:
        finer: list[tuple[Ranges, bool]] = []
        n_cut = 0
        for block, is_empty in level:
            verdict = EMPTY if is_empty else pairs.verdict(block)
            is_mixed = _is_mixed(pairs, block, verdict)
            if is_mixed and may_cut and _longer_side(block) > finest:
                n_cut += 1
                is_empty = verdict is EMPTY
                parts = _parts_below_diagonal(pairs, block)
                finer.extend((part, is_empty) for part in parts)
                continue
            n_pairs = _pairs_of_call(pairs, block)
            n_all += n_pairs
            n_kept += n_pairs * _WEIGHT[verdict]
        level = finer
        may_cut = 4 * n_cut <= _MAX_BLOCKS
    return _as_share(n_kept / n_all)


def _is_mixed(pairs: Pairs, block: Ranges, verdict: Verdict) -> bool:
    """Tell whether a call may leave out some pairs of a block and keep others."""
    return verdict is PARTIAL or _reaches_above_diagonal(pairs, block)


def _pairs_of_call(pairs: Pairs, block: Ranges) -> float:
    """Count the pairs of a block without a mask; on the diagonal a causal call has half
    of them."""
    n_pairs = float(block.queries.length * block.keys.length)
    return 0.5 * n_pairs if _reaches_above_diagonal(pairs, block) else n_pairs


def _parts_below_diagonal(pairs: Pairs, block: Ranges) -> list[Ranges]:
    """Return the quarters of a block, without those of which a causal call leaves out
    all pairs."""
    return [part for part in quarters(block) if not _is_above_diagonal(pairs, part)]


def _longer_side(block: Ranges) -> int:
    return max(block.queries.length, block.keys.length)


def _as_share(share: float) -> float:
    return min(1.0, max(share, 1e-6))


def _reaches_above_diagonal(pairs: Pairs, block: Ranges) -> bool:
    """Tell whether a causal call leaves out pairs of a block."""
    return pairs.is_causal and block.keys.stop - 1 > block.queries.start


def _is_above_diagonal(pairs: Pairs, block: Ranges) -> bool:
    """Tell whether a causal call leaves out all pairs of a block."""
    return pairs.is_causal and block.keys.start >= block.queries.stop
