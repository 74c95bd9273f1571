"""Which pairs of queries and keys a call has at all, as far as whole blocks of them can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from quorum_attention.decomposition.intervals import Interval
from quorum_attention.decomposition.verdicts import CLEAR, MASKED, MIXED, Verdict


class Ranges(NamedTuple):
    """A block of pairs: every query of an interval with every key of another; not empty."""

    queries: Interval
    keys: Interval

    @classmethod
    def of(cls, query_start: int, query_stop: int, key_start: int, key_stop: int) -> Ranges:
        """By its bounds."""
        return cls(Interval(query_start, query_stop), Interval(key_start, key_stop))


@dataclass(frozen=True)
class Pairs:
    """The pairs of a call, whatever tasks it is cut into.

    Attributes:
        n_queries, n_keys: how many there are.
        is_causal: a pair needs its key at or before its query.
        verdict: what a mask says of a block of positions, MIXED where it is not sure; None is
            no mask. It means the same as long as it lives: answers are remembered.
        share: of the pairs without the mask those that it keeps, for predictions, where that is
            known and not to be had from ``verdict`` (dilated blocks are MIXED however thin).
    """

    n_queries: int
    n_keys: int
    is_causal: bool
    verdict: Callable[[Ranges], Verdict] | None = None
    share: float | None = None

    @property
    def every_token_meets(self) -> bool:
        """Whether no token can be without a partner in a task: a square without a mask."""
        return self.verdict is None and self.n_queries == self.n_keys

    def of(self, block: Ranges) -> Verdict:
        """Whether a block of positions has pairs; it may reach beyond the last token."""
        (q0, q1), (k0, k1) = block
        inside = q1 <= self.n_queries and k1 <= self.n_keys
        if not inside:
            q1, k1 = min(q1, self.n_queries), min(k1, self.n_keys)
            if q0 >= q1 or k0 >= k1:
                return MASKED
        if self.is_causal and k0 >= q1:
            return MASKED
        found = CLEAR
        if self.verdict is not None:
            found = self.verdict(block if inside else Ranges.of(q0, q1, k0, k1))
        if found is CLEAR and (not inside or (self.is_causal and k1 - 1 > q0)):
            return MIXED
        return found


def window_verdict(left: int, right: int) -> Callable[[Ranges], Verdict]:
    """Of a sliding window: keys from ``left`` tokens before the query to ``right`` after it; -1 is
    no limit on that side."""

    def verdict(block: Ranges) -> Verdict:
        (q0, q1), (k0, k1) = block
        nearest, farthest = q0 - (k1 - 1), q1 - 1 - k0
        if (left >= 0 and nearest > left) or (right >= 0 and farthest < -right):
            return MASKED
        whole = (left < 0 or farthest <= left) and (right < 0 or nearest >= -right)
        return CLEAR if whole else MIXED

    return verdict
