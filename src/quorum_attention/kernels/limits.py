"""What one call of an operator may have at most, and the parts into which larger calls
are cut.

An operator may count elements in 32 bits, and a dimension of its grid has at most
65,535 blocks. Beyond that it fails, or returns wrong numbers without an error. The
limits were found by trial (docs/kernels.md). Batch entries and heads never meet, so a
call is cut between them first. Only where a single head is too large, its rows are cut.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from quorum_attention.arithmetic import even_part, round_up

NO_LIMIT = sys.maxsize
GRID_BLOCKS = 65_535
"""The most blocks along the second and the third dimension of a CUDA grid."""
INT32 = 2**31 - 1
"""The largest signed number of 32 bits."""

_TILE_ROWS = 128
_TILE_COLUMNS = 64


class CallSizes(NamedTuple):
    """The sizes of an operator call, as far as limits depend on them.

    Attributes:
        entries: batch entries.
        key_heads: key/value heads of an entry.
        group: query heads that share a key/value head.
        queries, keys: rows of a query head, and of a key/value head.
        width: the larger of head dimension and value dimension.
    """

    entries: int
    key_heads: int
    group: int
    queries: int
    keys: int
    width: int


@dataclass(frozen=True, slots=True)
class CallPart:
    """A part of a call: some batch entries, and some key/value heads with their query
    heads.

    Attributes:
        query_rows: the index of its rows in a tensor (b, hq, nq, ...).
        key_rows: the index of its rows in a tensor (b, hk, nk, ...).
    """

    query_rows: tuple[slice, slice]
    key_rows: tuple[slice, slice]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """The most that one call of an operator may have; ``NO_LIMIT`` where no limit was
    found.

    Attributes:
        entries: batch entries.
        heads: query heads of an entry.
        query_elements: elements of a tensor with a row for every query, within
            ``scope``.
        key_elements: elements of a tensor with a row for every key of every query head,
            within ``scope``.
        scope: which part of a tensor is counted: all of it ("call"); all of it, unless
            there is only one batch entry ("several entries"); one batch entry; or one
            head.
        padded: whether rows are counted in multiples of 128 and columns in multiples of
            64, as operators' workspaces have them.
    """

    entries: int = NO_LIMIT
    heads: int = NO_LIMIT
    query_elements: int = NO_LIMIT
    key_elements: int = NO_LIMIT
    scope: Literal["call", "several entries", "entry", "head"] = "call"
    padded: bool = False

    def rows(self, width: int) -> tuple[int, int]:
        """Return the most queries, and the most keys, of a call of a single head, whole
        tiles."""
        if self.scope == "several entries":
            return NO_LIMIT, NO_LIMIT
        columns = self._columns(width)
        queries = _whole_tiles(self.query_elements // columns)
        keys = _whole_tiles(self.key_elements // columns)
        return queries, keys

    def largest(self, sizes: CallSizes) -> tuple[int, int]:
        """Return the most batch entries, and key/value heads, of one call with rows of
        these sizes.

        There are no heads where the query heads of a single key/value head are too many
        or too large.
        """
        fitting_heads = self._fitting_heads(sizes)
        heads = self.heads
        if self.scope in ("call", "entry"):
            heads = min(heads, fitting_heads)
        elif self.scope == "head" and not fitting_heads:
            heads = 0
        key_heads = min(sizes.key_heads, heads // sizes.group)
        entries = min(sizes.entries, self.entries)
        if self.scope in ("call", "several entries"):
            heads_of_an_entry = max(1, key_heads * sizes.group)
            entries = min(entries, max(1, fitting_heads // heads_of_an_entry))
        return entries, key_heads

    def group_parts(self, sizes: CallSizes) -> int:
        """Return the number of equal parts of the query heads that share a key/value
        head, such that one such part can be a call."""
        for parts in range(1, sizes.group):
            if sizes.group % parts == 0 and self._takes_a_group_of(
                sizes.group // parts, sizes
            ):
                return parts
        return sizes.group

    def _takes_a_group_of(self, heads: int, sizes: CallSizes) -> bool:
        """Whether so many query heads of a single key/value head can be a call."""
        _, key_heads = self.largest(sizes._replace(key_heads=1, group=heads))
        return key_heads > 0

    def _fitting_heads(self, sizes: CallSizes) -> int:
        """Return how many query heads have no more elements than allowed."""
        columns = self._columns(sizes.width)
        query_elements = columns * self._rows(sizes.queries)
        key_elements = columns * self._rows(sizes.keys)
        return min(
            self.query_elements // query_elements, self.key_elements // key_elements
        )

    def _columns(self, width: int) -> int:
        if self.padded:
            width = round_up(width, _TILE_COLUMNS)
        return max(1, width)

    def _rows(self, rows: int) -> int:
        if self.padded:
            rows = round_up(rows, _TILE_ROWS)
        return max(1, rows)


UNLIMITED = CallLimits()


@lru_cache(maxsize=1024)
def call_parts(limits: CallLimits, sizes: CallSizes) -> tuple[CallPart, ...]:
    """Return the parts of a call that has at least one batch entry and one head.

    The query heads of a single key/value head stay together.
    """
    entries_of_a_part, key_heads_of_a_part = part_sizes(limits, sizes)
    group = sizes.group
    parts = []
    for entries in runs(slice(0, sizes.entries), entries_of_a_part):
        for key_heads in runs(slice(0, sizes.key_heads), key_heads_of_a_part):
            heads = slice(key_heads.start * group, key_heads.stop * group)
            parts.append(CallPart((entries, heads), (entries, key_heads)))
    return tuple(parts)


def part_sizes(limits: CallLimits, sizes: CallSizes) -> tuple[int, int]:
    """Return the batch entries and key/value heads of the largest part. Parts are about
    equal, so that operators have few sizes to prepare."""
    entries, key_heads = limits.largest(sizes)
    key_heads = max(1, key_heads)
    return even_part(sizes.entries, entries), even_part(sizes.key_heads, key_heads)


def runs(indices: slice, length: int) -> Iterator[slice]:
    """Yield ``indices`` in runs of ``length``; the last one may be shorter."""
    for start in range(indices.start, indices.stop, length):
        yield slice(start, min(start + length, indices.stop))


def _whole_tiles(rows: int) -> int:
    """Return ``rows`` rounded down to whole tiles, if there is one."""
    whole_tiles = rows // _TILE_ROWS * _TILE_ROWS
    return whole_tiles or max(1, rows)
