"""Cells: tokens of a batch entry that may meet, wherever they lie.

A cell is an entry's queries of one document and the keys that they may meet; without
documents it is all queries and the keys that are there. No token is in two cells. Cells
of similar sizes are the batch entries of one call: shorter ones are filled up with
copies of their own last token, of which keys are masked and queries are left out of the
results.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from quorum_attention.kernels.call_shape import BiasShape, CallShape, Extent
from quorum_attention.kernels.masked.block_nodes import begins_runs
from quorum_attention.kernels.masked.token_rules import Ids, PlaceRule

NO_KEY = np.iinfo(np.int64).min
"""The id of a key that no query keeps."""

# Cells of up to so many tokens may share a call.
_SMALL_CELL = 16
_N_SIZE_CLASSES = 256
# Bytes of a row beside its numbers: its index, and statistics.
_ROW_BYTES = 32
# Bytes for testing a pair: whether the key is a copy, and by its places.
_KEY_TEST_BYTES = 16
_PLACE_TEST_BYTES = 48


@dataclass(frozen=True, eq=False)
class CellSide:
    """The tokens of one side of several cells.

    Attributes:
        tokens: positions, (cells, longest); after the last token of a cell it is
            repeated.
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
        return CellSide(
            self.tokens[cells],
            self.counts[cells],
            self.n_tokens,
        )


@dataclass(frozen=True, eq=False)
class Bucket:
    """Cells of similar sizes.

    Attributes:
        entries: the batch entry of each cell, ascending.
        queries, keys: their tokens.
        rule: what else masks pairs; None: nothing, or a plain causal rule.
        causal: whether each cell is a square of which exactly the later keys are
            masked.
    """

    entries: Ids
    queries: CellSide
    keys: CellSide
    rule: PlaceRule | None = None
    causal: bool = False

    @property
    def bias_shape(self) -> BiasShape | None:
        """The mask that a call of its cells has beside the caller's own; None if it has
        none."""
        if self.rule is not None:
            return BiasShape(batch=True, heads=False, rows=True)
        # In a causal square copies of the last key come after all queries.
        if self.causal or not self.keys.is_filled:
            return None
        return BiasShape(batch=True, heads=False, rows=False)

    @property
    def pairs(self) -> int:
        """Pairs of all its cells."""
        return int((self.queries.counts * self.keys.counts).sum())

    @property
    def computed_pairs(self) -> int:
        """Pairs that calls compute, those with copies of tokens among them."""
        return self.entries.size * self.queries.longest * self.keys.longest

    def part(self, cells: slice) -> Bucket:
        """Some of the cells."""
        queries = self.queries.part(cells)
        keys = self.keys.part(cells)
        return Bucket(
            self.entries[cells],
            queries,
            keys,
            self.rule,
            self.causal,
        )

    def most_cells(self, n_entries: int) -> int:
        """The most cells of so many entries in a row."""
        stops = np.searchsorted(self.entries, self.entries + n_entries)
        n_cells = stops - np.arange(len(stops))
        return int(n_cells.max(initial=0))

    def extent(self, extent: Extent, n_cells: int) -> Extent:
        """The sizes of a call of ``n_cells``, for calls of ``extent``."""
        n_queries = self.queries.longest
        n_keys = self.keys.longest
        return Extent(
            n_cells,
            extent.query_heads,
            extent.key_heads,
            n_tokens=max(n_queries, n_keys),
            max_queries=n_queries,
            max_keys=n_keys,
            direct=True,
        )

    def cell_bytes(self, shape: CallShape, heads: int, kv_heads: int) -> int:
        """Bytes of a cell's gathered rows and results in a backward, of their indices,
        and of its mask."""
        n_queries = self.queries.longest
        n_keys = self.keys.longest
        widths = shape.kv_width
        itemsize = max(shape.dtype.itemsize, shape.bias_dtype.itemsize)
        query_numbers = 2 * widths + shape.value_dim
        key_numbers = 2 * widths
        query_row_bytes = query_numbers * itemsize + _ROW_BYTES
        key_row_bytes = key_numbers * itemsize + _ROW_BYTES
        n_bytes = heads * n_queries * query_row_bytes
        n_bytes += kv_heads * n_keys * key_row_bytes
        n_pairs = n_keys
        pair_bytes = _KEY_TEST_BYTES
        if self.rule is not None:
            n_pairs = n_keys * n_queries
            pair_bytes = _PLACE_TEST_BYTES
        if shape.bias is not None:
            n_pairs = n_keys * n_queries
            pair_bytes += heads * (2 * itemsize + 16)
        return n_bytes + n_pairs * (pair_bytes + itemsize)


def buckets_of(by_query: Ids, by_key: Ids, rule: PlaceRule) -> tuple[Bucket, ...]:
    """The cells of ids (batch, n), by their sizes."""
    queries = _TokenGroups(by_query)
    keys = _TokenGroups(by_key)
    names = np.unique(np.concatenate((queries.names, keys.names)))
    _, query_groups, key_groups = np.intersect1d(
        queries.codes(names),
        keys.codes(names),
        assume_unique=True,
        return_indices=True,
    )
    query_classes = _size_classes(queries.counts[query_groups])
    key_classes = _size_classes(keys.counts[key_groups])
    classes = query_classes * _N_SIZE_CLASSES + key_classes
    buckets = list[Bucket]()
    for number in np.unique(classes).tolist():
        cells = np.flatnonzero(classes == number)
        groups = query_groups[cells]
        buckets.append(
            _bucket(
                queries.entries[groups],
                queries.side(groups),
                keys.side(key_groups[cells]),
                rule,
            )
        )
    return tuple(buckets)


def _bucket(entries: Ids, queries: CellSide, keys: CellSide, rule: PlaceRule) -> Bucket:
    if rule.keeps_all:
        return Bucket(entries, queries, keys)
    if rule.is_plain_causal and _are_equal(queries, keys):
        return Bucket(entries, queries, keys, causal=True)
    return Bucket(entries, queries, keys, rule)


def _are_equal(queries: CellSide, keys: CellSide) -> bool:
    """Whether queries and keys of all cells have the same positions."""
    if not np.array_equal(queries.counts, keys.counts):
        return False
    return np.array_equal(queries.tokens, keys.tokens)


def _size_classes(counts: Ids) -> Ids:
    """Equal for numbers of tokens that may share a call: half powers of two."""
    logarithms = np.log2(np.maximum(counts, _SMALL_CELL))
    classes: Ids = np.ceil(2 * logarithms).astype(np.int64)
    return classes


class _TokenGroups:
    """Tokens of equal ids in each entry, (batch, n): groups by entry, then by id.

    Attributes:
        entries, names, counts: entry, id and number of tokens of each group.
    """

    def __init__(self, ids: Ids) -> None:
        self._n_tokens = ids.shape[1]
        order = np.argsort(ids, axis=1, kind="stable")
        ordered = np.take_along_axis(ids, order, axis=1)
        starts = np.flatnonzero(begins_runs(ordered))
        edges = np.append(starts, ids.size)
        counts = np.diff(edges)
        names = ordered.ravel()[starts]
        is_there = names != NO_KEY
        self._order = order.ravel()
        self._starts = starts[is_there]
        self.entries = self._starts // self._n_tokens
        self.names = names[is_there]
        self.counts = counts[is_there]

    def codes(self, names: Ids) -> Ids:
        """A number for each group, by its entry and its id, which is among
        ``names``."""
        codes: Ids = self.entries * len(names) + np.searchsorted(names, self.names)
        return codes

    def side(self, groups: Ids) -> CellSide:
        """The tokens of some groups."""
        counts = self.counts[groups]
        numbers = np.arange(int(counts.max()))
        places = np.minimum(
            numbers, counts[:, None] - 1
        )  # after the last one: the last one
        tokens = self._order[self._starts[groups][:, None] + places]
        return CellSide(tokens, counts, self._n_tokens)
