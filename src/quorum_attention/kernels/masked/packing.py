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
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from numpy.typing import NDArray

from quorum_attention.arithmetic import ceil_div
from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.protocol import BiasShape, CallShape, Extent, Kernel
from quorum_attention.kernels.torch_private import outside

Ids = NDArray[np.int64]

NO_KEY = np.iinfo(np.int64).min
"""The id of a key that no query keeps."""

# Bytes of the tensors of one call: on a CPU a cache's, elsewhere what keeps the device busy.
_HOST_BYTES, _DEVICE_BYTES = 8 << 20, 256 << 20
# Most pairs of a cell whose pairs are kept by their positions: they make a mask.
_MOST_PAIRS = 1 << 24
# Pairs of one head that take as long as a kernel call takes the host: of a call of blocks, whose
# results are merged, and of a packed one.
_BLOCK_CALL, _PACKED_CALL = 1 << 16, 1 << 14
_DEVICE_CALL = 1 << 26
# Pairs of one head that take as long as a row's copies.
_PAIRS_OF_A_ROW = 16
# Finding the blocks of a mask that is tested pair by pair takes as long as so many calls.
_CALLS_OF_A_TEST = 64
# Runs of a document above which its blocks are short.
_MANY_RUNS = 8
# How much less a packed call has to take.
_CLEARLY = 2
# Cells of up to so many tokens may share a call.
_SMALL = 16


@dataclass(frozen=True, eq=False)
class PlaceRule:
    """Which pairs are kept by their positions alone.

    Attributes:
        band: ``key - place`` has to lie in it.
        places: of queries among the keys, (1 or batch, n_queries).
        chunk: place and key have to lie in one chunk of so many; None: no such rule.
        is_causal: whether keys after the query's own number are masked as well.
    """

    band: Band
    places: Ids
    chunk: int | None = None
    is_causal: bool = False

    @property
    def keeps_all(self) -> bool:
        """Whether no pair is masked."""
        return self.band.keeps_all and self.chunk is None and not self.is_causal

    @property
    def is_plain_causal(self) -> bool:
        """Whether exactly the keys after a query's own number are masked."""
        if self.chunk is not None or self.band.low is not None:
            return False
        if self.band.high is None:
            return self.is_causal
        numbers = np.arange(self.places.shape[1])
        return self.band.high == 0 and bool((self.places == numbers).all())

    def keeps(
        self, entries: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Which pairs are kept, (cells, queries, keys), of entries (cells,) and of positions
        (cells, queries) and (cells, keys), on one device."""
        with outside():
            table = torch.from_numpy(np.ascontiguousarray(self.places)).to(queries.device)
        rows = entries[:, None] if len(table) > 1 else torch.zeros_like(entries)[:, None]
        places, columns = table[rows, queries][:, :, None], keys[:, None]
        distance = columns - places
        kept = torch.ones_like(distance, dtype=torch.bool)
        if self.band.low is not None:
            kept &= distance >= self.band.low
        if self.band.high is not None:
            kept &= distance <= self.band.high
        if self.chunk is not None:
            of_keys = torch.div(columns, self.chunk, rounding_mode="floor")
            kept &= of_keys == torch.div(places, self.chunk, rounding_mode="floor")
        if self.is_causal:
            kept &= columns <= queries[:, :, None]
        return kept


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
        by_query, by_key: ids of queries and of keys, (1 or batch, n): pairs of equal ids are kept,
            if the rule keeps them.
        rule: what is kept by positions.
    """

    buckets: tuple[Bucket, ...]
    by_query: Ids
    by_key: Ids
    rule: PlaceRule
    _placed: dict[torch.device, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

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
        rows = extent.batch * extent.query_heads * (self.by_query.shape[1] + 1)
        key_rows = extent.batch * extent.key_heads * (self.by_key.shape[1] + 1)
        widths = shape.head_dim + 3 * shape.value_dim + 1, 2 * (shape.head_dim + shape.value_dim)
        item = max(shape.dtype.itemsize, shape.state_dtype.itemsize)
        total: int = largest + (rows * widths[0] + key_rows * widths[1]) * item
        return total

    def kept(
        self, entries: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor
    ) -> torch.Tensor:
        """Which pairs are kept, (entries, 1, queries, keys), of positions on one device."""
        if queries.device not in self._placed:
            with outside():
                by_query, by_key = (
                    torch.from_numpy(np.ascontiguousarray(ids)).to(queries.device)
                    for ids in (self.by_query, self.by_key)
                )
            self._placed[queries.device] = by_query, by_key
        of_query, of_key = (
            table[entries if len(table) > 1 else entries[:1] * 0][:, tokens]
            for table, tokens in zip(self._placed[queries.device], (queries, keys), strict=True)
        )
        equal = of_query[:, :, None] == of_key[:, None]
        if not self.rule.keeps_all:
            n = len(entries)
            equal = equal & self.rule.keeps(entries, queries.expand(n, -1), keys.expand(n, -1))
        return equal.unsqueeze(1)


def packing_of(by_query: Ids, by_key: Ids, rule: PlaceRule, shape: CallShape) -> Packing | None:
    """The packing of a mask that keeps pairs of equal ids, as far as a rule of positions keeps
    them; None where it would not be clearly faster than blocks of neighbouring tokens.

    Args:
        by_query, by_key: (1 or batch, n); of keys ``NO_KEY`` in those that no query keeps.
    """
    if 0 in (shape.batch, shape.heads, shape.n_queries, shape.n_keys):
        return None
    n_calls, n_pairs = _cost_of_blocks(by_query, by_key, shape)
    on_host = shape.device_type == "cpu"
    block_call, packed_call = (
        (_BLOCK_CALL, _PACKED_CALL) if on_host else (_DEVICE_CALL, _DEVICE_CALL)
    )
    cost = n_calls * block_call + n_pairs * shape.heads
    if n_calls <= _CLEARLY:
        return None
    batch = shape.batch
    of_query, of_key = (np.broadcast_to(ids, (batch, ids.shape[1])) for ids in (by_query, by_key))
    packing = Packing(_buckets(of_query, of_key, rule), by_query, by_key, rule)
    if any(
        bucket.rule is not None and bucket.queries.longest * bucket.keys.longest > _MOST_PAIRS
        for bucket in packing.buckets
    ):
        return None
    heads = shape.heads, shape.kv_heads
    n_chunks = sum(
        ceil_div(len(bucket.entries), packing.cells_of_a_call(bucket, shape, heads))
        for bucket in packing.buckets
    )
    rows = batch * (shape.n_queries + shape.n_keys) * _PAIRS_OF_A_ROW
    packed = n_chunks * packed_call + (packing.computed_pairs + rows) * shape.heads
    return packing if packed * _CLEARLY <= cost else None


def _cost_of_blocks(by_query: Ids, by_key: Ids, shape: CallShape) -> tuple[int, int]:
    """About how many calls blocks of neighbouring tokens take, and pairs of one head, rows that are
    merged among them."""
    query_runs, key_runs = _count_runs(by_query), _count_runs(by_key)
    names = _count_names(by_query)
    n_entries = max(len(by_query), len(by_key))
    # Entries are computed together with the one before if their ids are the same.
    begins = np.zeros(n_entries, np.bool_)
    begins[0] = True
    for ids in (by_query, by_key):
        if len(ids) > 1:
            begins[1:] |= (ids[1:] != ids[:-1]).any(axis=1)
    # Runs that meet many others are no blocks, but tested pair by pair.
    is_tested = query_runs * key_runs > _MANY_RUNS * names * (query_runs + key_runs)
    n_blocks = np.maximum(query_runs, key_runs)
    if shape.device_type != "cpu":
        # There one launch takes all blocks, but short ones are as slow as tests.
        is_tested |= n_blocks > _MANY_RUNS * names
        n_blocks = np.ones_like(n_blocks)
    area = shape.n_queries * shape.n_keys
    calls = np.where(is_tested, _CALLS_OF_A_TEST, n_blocks)
    merged = shape.n_queries * np.maximum(1, key_runs // names) * _PAIRS_OF_A_ROW
    pairs = np.where(is_tested, area, area // names + merged)
    n_calls = int(np.broadcast_to(calls, n_entries)[begins].sum())
    n_pairs = int(np.broadcast_to(pairs, n_entries).sum()) * (shape.batch // n_entries)
    return n_calls, n_pairs


def _count_runs(ids: Ids) -> Ids:
    """Runs of equal numbers in each row, (rows,)."""
    counts: Ids = (ids[:, 1:] != ids[:, :-1]).sum(axis=1) + 1
    return counts


def _count_names(ids: Ids) -> Ids:
    """Distinct numbers in each row, (rows,)."""
    return _count_runs(np.sort(ids, axis=1))


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
