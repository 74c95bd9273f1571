"""The sizes of a sharded call, and how much work its rows are."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Literal

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.bands import Band
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.partition import RowWork

# Rows are cut at multiples of a kernel's tile where a shard has at least so many tiles.
_TILE = 128
_MIN_TILES = 32
# Rows are counted under a mask in at most 2 ** 10 steps.
_MAX_STEPS_BITS = 10

Divisible = Literal["pairs", "rows", "heads"]


def rows_per_step(n_tokens: int) -> int:
    """Return the rows of a step: the pairs that a mask keeps are counted by steps."""
    return 1 << max(0, (n_tokens - 1).bit_length() - _MAX_STEPS_BITS)


@dataclass(frozen=True)
class ShardedShape:
    """The sizes of a sharded call.

    Attributes:
        starts: rank r holds the tokens [starts[r], starts[r + 1]); the last entry is
            the number of tokens of the whole sequence.
        heads, kv_heads: query heads and key/value heads; the second divides the first.
        is_causal: token i sees tokens j <= i.
        units: what may be given to a rank by itself: "pairs" of any kind; "rows" with
            all their keys (under a mask: nothing is merged then); "heads" (with
            dropout, whose pairs are numbered by head).
        n_head_groups: calls that a rank's share is cut into where heads are exchanged
            whole.
        kept_pairs: under a mask, the pairs of a head's rows before each step of rows,
            and of all rows; within a step all rows count alike. None: no mask.
    """

    starts: tuple[int, ...]
    heads: int
    kv_heads: int
    is_causal: bool
    units: Divisible = "pairs"
    n_head_groups: int = 1
    kept_pairs: tuple[int, ...] | None = None

    @property
    def n_ranks(self) -> int:
        """The ranks of the group."""
        return len(self.starts) - 1

    @property
    def n_tokens(self) -> int:
        """The tokens of the whole sequence."""
        return self.starts[-1]

    @property
    def shards(self) -> list[Interval]:
        """The tokens of each rank."""
        return [Interval(*ends) for ends in pairwise(self.starts)]

    @property
    def group_size(self) -> int:
        """The query heads of a key/value head."""
        return self.heads // self.kv_heads

    @property
    def n_pairs(self) -> int:
        """The pairs of all heads."""
        return self.heads * self.pairs_above(self.n_tokens)

    @cached_property
    def row_work(self) -> RowWork:
        """The rows of a head as work that is cut at tiles, or not at all with
        dropout."""
        if self.units == "heads":
            tile = max(1, self.n_tokens)
        else:
            rows_of_tile = max(1, self.n_tokens // self.n_ranks // _MIN_TILES)
            tile = min(_TILE, 1 << rows_of_tile.bit_length() - 1)
        return RowWork(self.n_tokens, tile, self.pairs_above)

    def pairs_above(self, row: int) -> int:
        """Return the pairs of the rows before ``row`` of one head."""
        if self.kept_pairs is None:
            band = Band(high=0 if self.is_causal else None)
            return band.count(0, row, 0, self.n_tokens)
        step_rows = rows_per_step(self.n_tokens)
        step, rows_in_step = divmod(row, step_rows)
        pairs_before = self.kept_pairs[step]
        if not rows_in_step:
            return pairs_before
        pairs_of_step = self.kept_pairs[step + 1] - pairs_before
        # The last step may be shorter.
        rows_of_step = min(step_rows, self.n_tokens - step * step_rows)
        return pairs_before + pairs_of_step * rows_in_step // rows_of_step

    def kv_of(self, heads: Interval) -> Interval:
        """Return the key/value heads that query heads read."""
        first = heads.start // self.group_size
        return Interval(first, ceil_div(heads.stop, self.group_size))
