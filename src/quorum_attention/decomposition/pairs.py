"""Which pairs of queries and keys a call keeps, told block by block."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.verdicts import EMPTY, FULL, PARTIAL, Verdict


class Ranges(NamedTuple):
    """A block of pairs: every query of one interval with every key of another; never empty."""

    queries: Interval
    keys: Interval

    @classmethod
    def of(cls, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Ranges:
        """The block with these bounds."""
        return cls(Interval(query_start, query_stop), Interval(key_start, key_stop))


@dataclass(frozen=True)
class Pairs:
    """The pairs that a call keeps. They do not depend on the tasks it is cut into.

    Attributes:
        n_queries, n_keys: of the call.
        is_causal: keep only keys at or before the query.
        verdict: the mask's answer for a block of positions, PARTIAL where it does not know; None is
            no mask. Its answers are cached, so they must never change.
        share: the share of pairs that the mask keeps, for predictions; None: to be found by asking
            ``verdict``. (A mask that keeps a thin pattern everywhere has to give it: all its blocks
            are PARTIAL.)
    """

    n_queries: int
    n_keys: int
    is_causal: bool
    verdict: Callable[[Ranges], Verdict] | None = None
    share: float | None = None

    @property
    def every_token_meets(self) -> bool:
        """Whether every token of every task has a kept pair: as many queries as keys, no mask."""
        return self.verdict is None and self.n_queries == self.n_keys

    def of(self, block: Ranges) -> Verdict:
        """The verdict on a block of positions, which may reach beyond the last token."""
        (q0, q1), (k0, k1) = block
        inside = q1 <= self.n_queries and k1 <= self.n_keys
        if not inside:
            q1, k1 = min(q1, self.n_queries), min(k1, self.n_keys)
            if q0 >= q1 or k0 >= k1:
                return EMPTY
        if self.is_causal and k0 >= q1:
            return EMPTY
        found = FULL
        if self.verdict is not None:
            found = self.verdict(block if inside else Ranges.of(q0, q1, k0, k1))
        if found is FULL and (not inside or (self.is_causal and k1 - 1 > q0)):
            return PARTIAL
        return found


def window_verdict(left: int, right: int) -> Callable[[Ranges], Verdict]:
    """The verdict of a sliding window.

    It keeps keys from ``left`` tokens before the query to ``right`` tokens after it; -1 is no limit
    on that side.
    """

    def verdict(block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        nearest, farthest = q0 - (k1 - 1), q1 - 1 - k0
        if (left >= 0 and nearest > left) or (right >= 0 and farthest < -right):
            return EMPTY
        whole = (left < 0 or farthest <= left) and (right < 0 or nearest >= -right)
        return FULL if whole else PARTIAL

    return verdict
