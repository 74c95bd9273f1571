"""Which pairs of queries and keys a call has at all, as far as whole blocks of them can tell."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

Verdict = Literal["empty", "full", "mixed"]


@dataclass(frozen=True)
class Ranges:
    """A block of pairs: first and last query, first and last key, inclusive."""

    first_query: int
    last_query: int
    first_key: int
    last_key: int


@dataclass(frozen=True)
class Pairs:
    """The pairs of a call, whatever tasks it is cut into.

    Attributes:
        n_queries, n_keys: how many there are.
        is_causal: a pair needs its key at or before its query.
        verdict: what a mask says of a block of positions, "mixed" where it is not sure; None is
            no mask. It means the same as long as it lives: answers are remembered.
        share: of the pairs without the mask those that it keeps, for predictions, where that is
            known and not to be had from ``verdict`` (dilated blocks are "mixed" however thin).
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
        last_query = min(block.last_query, self.n_queries - 1)
        last_key = min(block.last_key, self.n_keys - 1)
        if block.first_query > last_query or block.first_key > last_key:
            return "empty"
        if self.is_causal and block.first_key > last_query:
            return "empty"
        found: Verdict = "full"
        if self.verdict is not None:
            found = self.verdict(Ranges(block.first_query, last_query, block.first_key, last_key))
        cut_off = (last_query, last_key) != (block.last_query, block.last_key)
        if found == "full" and (cut_off or (self.is_causal and last_key > block.first_query)):
            return "mixed"
        return found


def window_verdict(left: int, right: int) -> Callable[[Ranges], Verdict]:
    """Of a sliding window: keys from ``left`` tokens before the query to ``right`` after it; -1 is
    no limit on that side."""

    def verdict(block: Ranges) -> Verdict:
        nearest = block.first_query - block.last_key
        farthest = block.last_query - block.first_key
        if (left >= 0 and nearest > left) or (right >= 0 and farthest < -right):
            return "empty"
        whole = (left < 0 or farthest <= left) and (right < 0 or nearest >= -right)
        return "full" if whole else "mixed"

    return verdict
