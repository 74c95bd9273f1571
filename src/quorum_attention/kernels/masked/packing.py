"""Packed calls: tokens that may meet are gathered, and many small groups of them go to one kernel
call.

A *cell* is a batch entry's queries of one document and the keys that they may meet, wherever these
tokens lie; without documents it is all queries and the keys that are there. No token is in two
cells. Cells of similar sizes are the batch entries of one call: shorter ones are filled up with
copies of their own last token, of which keys are masked and queries are left out of the results.
So a key that no query keeps is not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from quorum_attention.arithmetic import ceil_div
from quorum_attention.kernels.masked.costs import cost_of_packed_calls
from quorum_attention.kernels.masked.token_rules import Ids, PlaceRule
from quorum_attention.kernels.protocol import BiasShape, CallShape, Extent, Kernel

NO_KEY = np.iinfo(np.int64).min
"""The id of a key that no query keeps."""

# Bytes of the tensors of one call: on a CPU a cache's, elsewhere what keeps the device busy.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 256 << 20
# Most pairs of a cell whose pairs are kept by their positions: they make a mask.
_MOST_PAIRS = 1 << 24
# How much less a packed call has to take.
_CLEARLY = 2
# Cells of up to so many tokens may share a call.
_SMALL = 16


@dataclass(frozen=True, eq=False)
class CellSide:
    """The tokens of one side of several cells.

    Attributes:
        tokens: positions, (cells, longest); after the last token of a cell it is repeated.
        counts: how many tokens a cell has, (cells,).
        n_tokens: of this side of an entry.
    """

    tokens: Ids
    counts: Ids
    n_tokens: int

    @property
    def longest(self) -> int:
        """Tokens of the longest cell."""
        return int(self.tokens.shape[1])

    @property
    def is_filled(self) -> bool:
        """Whether some cells have copies of their last token."""
        return bool((self.counts < self.longest).any())

    @property
    def is_all(self) -> bool:
        """Whether each cell has all tokens of its entry, in order."""
        if self.longest != self.n_tokens or self.is_filled:
            return False
        return bool((self.tokens == np.arange(self.n_tokens)).all())

    def part(self, cells: slice) -> CellSide:
        """Some of the cells."""
        return CellSide(self.tokens[cells], self.counts[cells], self.n_tokens)


@dataclass(frozen=True, eq=False)
class Bucket:
    """Cells of similar sizes.

    Attributes:
        entries: the batch entry of each cell, ascending.
        queries, keys: their tokens.
        rule: what else masks pairs; None: nothing, or a plain causal rule.
        causal: whether each cell is a square of which exactly the later keys are masked.
    """

    entries: Ids
    queries: CellSide
    keys: CellSide
    rule: PlaceRule | None = None
    causal: bool = False

    @property
    def bias_shape(self) -> BiasShape | None:
        """The mask that a call of its cells has beside the caller's own; None if it has none."""
        if self.rule is not None:
            return BiasShape(batch=True, heads=False, rows=True)
        # In a causal square copies of the last key come after all queries.
        is_masked = self.keys.is_filled and not self.causal
        return BiasShape(batch=True, heads=False, rows=False) if is_masked else None

    def part(self, cells: slice) -> Bucket:
        """Some of the cells."""
        queries, keys = self.queries.part(cells), self.keys.part(cells)
        return Bucket(self.entries[cells], queries, keys, self.rule, self.causal)

    def most_cells(self, n_entries: int) -> int:
        """The most cells of so many entries in a row."""
        stops = np.searchsorted(self.entries, self.entries + n_entries)
        return int((stops - np.arange(len(stops))).max(initial=0))

    def extent(self, extent: Extent, n_cells: int) -> Extent:
        """The sizes of a call of ``n_cells``, for calls of ``extent``."""
        longest = self.queries.longest, self.keys.longest
        return Extent(
            n_cells, extent.query_heads, extent.key_heads, max(longest), *longest, direct=True
        )

    def cell_bytes(self, shape: CallShape, heads: int, kv_heads: int) -> int:
        """Bytes of a cell's gathered rows and results in a backward, of their indices, and of its
        mask."""
        both = shape.head_dim + shape.value_dim
        item = max(shape.dtype.itemsize, shape.bias_dtype.itemsize)
        rows = heads * self.queries.longest * ((2 * both + shape.value_dim) * item + 32)
        rows += kv_heads * self.keys.longest * (2 * both * item + 32)
        n_pairs = self.keys.longest * (1 if self.rule is None else self.queries.longest)
        tests = 48 if self.rule is not None else 16
        if shape.bias is not None:
            n_pairs = self.keys.longest * self.queries.longest
            tests += heads * (2 * item + 16)
        return rows + n_pairs * (tests + item)


@dataclass(frozen=True, eq=False)
class Packing:
    """The cells of a mask.

    Attributes:
        buckets: which hold all cells.
        n_queries, n_keys: of a batch entry.
    """

    buckets: tuple[Bucket, ...]
    n_queries: int
    n_keys: int

    @property
    def pairs(self) -> int:
        """Pairs of all cells."""
        return sum(int((b.queries.counts * b.keys.counts).sum()) for b in self.buckets)

    @property
    def computed_pairs(self) -> int:
        """Pairs that calls compute, those with copies of tokens among them."""
        return sum(b.entries.size * b.queries.longest * b.keys.longest for b in self.buckets)

    def chunks(self, shape: CallShape, heads: tuple[int, int], entries: slice) -> Iterator[Bucket]:
        """The cells of some entries, by the calls that compute them.

        Args:
            heads: of queries, and of keys, in a call.
        """
        for bucket in self.buckets:
            first, last = np.searchsorted(bucket.entries, (entries.start, entries.stop)).tolist()
            most = self.cells_of_a_call(bucket, shape, heads)
            for start in range(first, last, most):
                yield bucket.part(slice(start, min(start + most, last)))

    def cells_of_a_call(self, bucket: Bucket, shape: CallShape, heads: tuple[int, int]) -> int:
        """The most cells of a bucket that are computed at a time."""
        most = _HOST_BYTES if shape.device_type == "cpu" else _DEVICE_BYTES
        n_cells: int = max(1, most // bucket.cell_bytes(shape, *heads))
        return n_cells

    def workspace_bytes(
        self, kernel: Kernel, shape: CallShape, extent: Extent, *, backward: bool
    ) -> int:
        """Upper bound of the device bytes of a whole call whose parts ``kernel`` computes."""
        heads, largest = (extent.query_heads, extent.key_heads), 0
        for bucket in self.buckets:
            most = self.cells_of_a_call(bucket, shape, heads)
            n_cells = min(most, bucket.most_cells(extent.batch))
            inside, mask = bucket.extent(extent, n_cells), bucket.bias_shape
            if shape.bias is not None:
                mask = replace(shape.bias, batch=True, rows=True)
            part = replace(shape, bias=mask, is_causal=bucket.causal)
            run = kernel.backward_workspace_bytes if backward else kernel.forward_workspace_bytes
            gathered = n_cells * bucket.cell_bytes(shape, *heads)
            largest = max(largest, gathered + run(part, inside))
        # Results, and rows that have to be copied to lie one after the other.
        rows = extent.batch * extent.query_heads * (self.n_queries + 1)
        key_rows = extent.batch * extent.key_heads * (self.n_keys + 1)
        widths = shape.head_dim + 3 * shape.value_dim + 1, 2 * (shape.head_dim + shape.value_dim)
        item = max(shape.dtype.itemsize, shape.state_dtype.itemsize)
        total: int = largest + (rows * widths[0] + key_rows * widths[1]) * item
        return total


def packing_of(
    by_query: Ids, by_key: Ids, rule: PlaceRule, shape: CallShape, cost: float
) -> Packing | None:
    """The packing of a mask that keeps pairs of equal ids, as far as a rule of positions keeps
    them; None where it would not be clearly cheaper than ``cost`` (``costs.py``).

    Args:
        by_query, by_key: (1 or batch, n); of keys ``NO_KEY`` in those that no query keeps.
    """
    batch = shape.batch
    of_query, of_key = (np.broadcast_to(ids, (batch, ids.shape[1])) for ids in (by_query, by_key))
    packing = Packing(_buckets(of_query, of_key, rule), shape.n_queries, shape.n_keys)
    if any(
        bucket.rule is not None and bucket.queries.longest * bucket.keys.longest > _MOST_PAIRS
        for bucket in packing.buckets
    ):
        return None
    heads = shape.heads, shape.kv_heads
    n_calls = sum(
        ceil_div(len(bucket.entries), packing.cells_of_a_call(bucket, shape, heads))
        for bucket in packing.buckets
    )
    packed = cost_of_packed_calls(n_calls, packing.computed_pairs, shape)
    return packing if packed * _CLEARLY <= cost else None


def _buckets(by_query: Ids, by_key: Ids, rule: PlaceRule) -> tuple[Bucket, ...]:
    """The cells of ids (batch, n), by their sizes."""
    queries, keys = _TokenGroups(by_query), _TokenGroups(by_key)
    names = np.unique(np.concatenate((queries.names, keys.names)))
    query_codes, key_codes = (
        side.entries * len(names) + np.searchsorted(names, side.names) for side in (queries, keys)
    )
    _, of_query, of_key = np.intersect1d(
        query_codes, key_codes, assume_unique=True, return_indices=True
    )
    n_queries, n_keys = queries.counts[of_query], keys.counts[of_key]
    classes = _size_class(n_queries) * 256 + _size_class(n_keys)
    found = []
    for number in np.unique(classes).tolist():
        cells = np.flatnonzero(classes == number)
        side = queries.side(of_query[cells])
        other = keys.side(of_key[cells])
        entries = queries.entries[of_query[cells]]
        found.append(_bucket(entries, side, other, rule))
    return tuple(found)


def _bucket(entries: Ids, queries: CellSide, keys: CellSide, rule: PlaceRule) -> Bucket:
    if rule.keeps_all:
        return Bucket(entries, queries, keys)
    is_square = (
        rule.is_plain_causal
        and np.array_equal(queries.counts, keys.counts)
        and np.array_equal(queries.tokens, keys.tokens)
    )
    return Bucket(entries, queries, keys, None if is_square else rule, causal=is_square)


def _size_class(counts: Ids) -> Ids:
    """Equal for numbers of tokens that may share a call: half powers of two."""
    classes: Ids = np.ceil(2 * np.log2(np.maximum(counts, _SMALL))).astype(np.int64)
    return classes


class _TokenGroups:
    """Tokens of equal ids in each entry, (batch, n): groups by entry, then by id.

    Attributes:
        entries, names, counts: entry, id and number of tokens of each group.
    """

    def __init__(self, ids: Ids) -> None:
        self.n_tokens = ids.shape[1]
        order = np.argsort(ids, axis=1, kind="stable")
        ordered = np.take_along_axis(ids, order, axis=1)
        begins = np.ones(ids.shape, np.bool_)
        begins[:, 1:] = ordered[:, 1:] != ordered[:, :-1]
        starts = np.flatnonzero(begins)
        counts = np.diff(np.append(starts, ids.size))
        names = ordered.ravel()[starts]
        is_there = names != NO_KEY
        self._order, self._starts = order.ravel(), starts[is_there]
        self.entries = self._starts // self.n_tokens
        self.names, self.counts = names[is_there], counts[is_there]

    def side(self, groups: Ids) -> CellSide:
        """The tokens of some groups."""
        counts = self.counts[groups]
        places = np.minimum(np.arange(int(counts.max())), counts[:, None] - 1)
        tokens = self._order[self._starts[groups][:, None] + places]
        return CellSide(tokens, counts, self.n_tokens)
