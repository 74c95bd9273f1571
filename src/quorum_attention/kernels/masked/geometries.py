"""The geometries of a mask: what it keeps in each batch entry of a call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.geometry import AnyOf, Geometry, bounds_of, geometry_of
from quorum_attention.kernels.masked.mask_fields import relative_band
from quorum_attention.kernels.masked.mask_numbers import document_ids, kept_key_ids, query_offsets
from quorum_attention.kernels.masked.rules import EqualIds, PlacesInBand
from quorum_attention.kernels.masked.token_rules import Ids
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask

# Ids whose runs make more blocks than this many times the runs are compared pair by pair instead.
_BLOCKS_PER_RUN = 8
_FEW_BLOCKS = 4096


def geometries(mask: Mask, shape: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """One geometry for each batch entry, or one for all of them.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    with no_torch_modes():
        by_entry = _geometries_of_fields(mask, shape, is_causal)
        if mask.keeps is not None:
            by_entry = _intersected(by_entry, (geometry_of(mask.keeps),))
        for inner in mask.every:
            by_entry = _intersected(by_entry, geometries(inner, shape, False))
        if mask.either:
            alternatives = [geometries(inner, shape, False) for inner in mask.either]
            by_entry = _intersected(by_entry, _united(alternatives))
    return by_entry


def _intersected(
    geometries_a: Sequence[Geometry], geometries_b: Sequence[Geometry]
) -> tuple[Geometry, ...]:
    """The pairs that two masks keep, entry by entry; the same objects give the same object."""
    intersect = cache(Geometry.__and__)
    n_entries = max(len(geometries_a), len(geometries_b))
    by_entry: list[Geometry] = []
    for entry in range(n_entries):
        a = geometries_a[entry % len(geometries_a)]
        b = geometries_b[entry % len(geometries_b)]
        by_entry.append(intersect(a, b))
    return tuple(by_entry)


def _united(alternatives: Sequence[Sequence[Geometry]]) -> tuple[Geometry, ...]:
    """The pairs that at least one of several masks keeps, entry by entry."""
    n_entries = max(map(len, alternatives))
    by_entry: list[Geometry] = []
    for entry in range(n_entries):
        rule = AnyOf(tuple(mask[entry % len(mask)] for mask in alternatives))
        by_entry.append(Geometry(rules=(rule,)))
    return tuple(by_entry)


class _EntryNumbers(NamedTuple):
    """The numbers of a batch entry.

    Attributes:
        by_query, by_key: ids, (n,) each; of keys ``NO_KEY`` in those that are left out.
        offsets: of the places of queries, (1,) or (n_queries,).
    """

    by_query: Ids
    by_key: Ids
    offsets: Ids

    @property
    def key(self) -> bytes:
        """The same for entries of the same numbers."""
        return self.by_query.tobytes() + self.by_key.tobytes() + self.offsets.tobytes()

    @property
    def has_one_offset(self) -> bool:
        """Whether all queries are as far from their own numbers."""
        return bool((self.offsets == self.offsets[:1]).all())


def _geometries_of_fields(mask: Mask, shape: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """The geometries of a mask's own fields, without the masks that it holds."""
    if not shape.batch:
        return (_at_offset(mask, shape, is_causal, 0),)
    by_query, key_ids = document_ids(mask, shape)
    by_key = kept_key_ids(mask, shape, key_ids)
    offsets = query_offsets(mask, shape)
    at_offset = cache(partial(_at_offset, mask, shape, is_causal))
    by_numbers: dict[bytes, Geometry] = {}
    of_entries = list[Geometry]()
    for entry in range(max(len(by_query), len(by_key), len(offsets))):
        numbers = _EntryNumbers(
            by_query[entry % len(by_query)],
            by_key[entry % len(by_key)],
            offsets[entry % len(offsets)],
        )
        key = numbers.key
        if key not in by_numbers and numbers.has_one_offset:
            offset = int(numbers.offsets[0]) if len(numbers.offsets) else 0
            equal = _equal_ids(numbers.by_query, numbers.by_key)
            by_numbers[key] = at_offset(offset) & equal
        elif key not in by_numbers:
            by_numbers[key] = _at_offsets(mask, shape, is_causal, numbers)
        of_entries.append(by_numbers[key])
    return tuple(of_entries) if len(by_numbers) > 1 else (of_entries[0],)


def _at_offset(mask: Mask, shape: CallShape, is_causal: bool, offset: int) -> Geometry:
    """The pairs of causal rule, window and chunk for queries that stand ``offset`` keys further."""
    band = relative_band(mask).moved(offset)
    if is_causal:
        band = band & Band(None, 0)
    # Bounds that cut nothing are none.
    low = band.low
    if low is not None and low <= 1 - shape.n_queries:
        low = None
    high = band.high
    if high is not None and high >= shape.n_keys - 1:
        high = None
    return Geometry(Band(low, high)) & _in_chunk(mask, shape, np.array(offset))


def _at_offsets(mask: Mask, shape: CallShape, is_causal: bool, numbers: _EntryNumbers) -> Geometry:
    """The pairs that a mask's own fields keep where queries stand at different offsets."""
    by_query, by_key, offsets = numbers
    causal_band = Band(None, 0 if is_causal and shape.n_keys > 1 else None)
    in_chunk = Geometry(causal_band) & _in_chunk(mask, shape, offsets)
    band = relative_band(mask)
    if band.keeps_all:
        return in_chunk & _equal_ids(by_query, by_key)
    return in_chunk & _equal_ids_in_band(numbers, band)


def _in_chunk(mask: Mask, shape: CallShape, offsets: Ids) -> Geometry:
    """Pairs within one chunk; all, if the mask has no chunks."""
    if mask.chunk is None:
        return Geometry()
    places = np.arange(shape.n_queries) + offsets
    keys = np.arange(shape.n_keys)
    return _equal_ids(places // mask.chunk, keys // mask.chunk)


class _RunPairs(NamedTuple):
    """Runs of queries and runs of keys, and which of them have equal ids.

    Attributes:
        query_runs, key_runs: start and stop, (runs, 2) each.
        query_numbers, key_numbers: of the runs of each pair, by ascending queries.
    """

    query_runs: Ids
    key_runs: Ids
    query_numbers: Ids
    key_numbers: Ids

    @property
    def blocks(self) -> Ids:
        """The blocks of pairs, (pairs, 4)."""
        query_sides = self.query_runs[self.query_numbers]
        key_sides = self.key_runs[self.key_numbers]
        return np.concatenate((query_sides, key_sides), axis=1)


def _equal_ids(by_query: Ids, by_key: Ids) -> Geometry:
    """Pairs of equal ids, as blocks; as a rule where there would be too many blocks."""
    rules = (EqualIds(by_query, by_key),)
    pairs = _few_run_pairs(by_query, by_key, _runs(by_query))
    if pairs is None:
        return Geometry(rules=rules)
    blocks = pairs.blocks
    if np.array_equal(blocks, [[0, len(by_query), 0, len(by_key)]]):
        return Geometry()
    return Geometry(blocks=blocks, same=rules)


def _equal_ids_in_band(numbers: _EntryNumbers, band: Band) -> Geometry:
    """Pairs of equal ids for which ``key - query - offset`` lies in a band, as blocks with bounds;
    as rules where there would be too many blocks."""
    by_query, by_key, offsets = numbers
    places = np.arange(len(by_query)) + offsets
    rules = (EqualIds(by_query, by_key), PlacesInBand(places, len(by_key), band))
    pairs = _few_run_pairs(by_query, by_key, _runs(by_query, offsets))
    if pairs is None:
        return Geometry(rules=rules)
    run_offsets = offsets[pairs.query_runs[:, 0]].tolist()
    run_bounds = [bounds_of(band.moved(offset)) for offset in run_offsets]
    bounds = np.array(run_bounds, dtype=np.int64).reshape(-1, 2)
    return Geometry(blocks=pairs.blocks, same=rules, bounds=bounds[pairs.query_numbers])


def _few_run_pairs(by_query: Ids, by_key: Ids, query_runs: Ids) -> _RunPairs | None:
    """The pairs of runs of equal ids; None where they are too many."""
    key_runs = _runs(by_key)
    query_names = by_query[query_runs[:, 0]]
    key_names = by_key[key_runs[:, 0]]
    order = np.argsort(key_names, kind="stable")
    ordered_names = key_names[order]
    firsts = np.searchsorted(ordered_names, query_names, side="left")
    counts = np.searchsorted(ordered_names, query_names, side="right") - firsts
    n_pairs = int(counts.sum())
    if n_pairs > max(_FEW_BLOCKS, _BLOCKS_PER_RUN * (len(query_runs) + len(key_runs))):
        return None
    query_numbers = np.repeat(np.arange(len(query_runs)), counts)
    before = np.repeat(np.cumsum(counts) - counts, counts)
    nth = np.arange(n_pairs) - before
    key_numbers = order[np.repeat(firsts, counts) + nth]
    return _RunPairs(query_runs, key_runs, query_numbers, key_numbers)


def _runs(*numbers: Ids) -> NDArray[np.int64]:
    """(n, 2): start and stop of the runs in which each of ``numbers`` stays equal."""
    n_tokens = len(numbers[0])
    if not n_tokens:
        return np.zeros((0, 2), np.int64)
    has_changed = np.zeros(n_tokens - 1, np.bool_)
    for ids in numbers:
        has_changed |= ids[1:] != ids[:-1]
    changes = np.flatnonzero(has_changed) + 1
    edges = np.concatenate(([0], changes, [n_tokens])).astype(np.int64)
    return np.stack((edges[:-1], edges[1:]), axis=1)
