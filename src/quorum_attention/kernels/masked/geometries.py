"""The geometries of a mask: what it keeps in each batch entry of a call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial, reduce
from typing import NamedTuple

import numpy as np

from quorum_attention.decomposition.bands import Band
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.masked.block_nodes import begins_runs, consecutive
from quorum_attention.kernels.masked.blocks import Blocks
from quorum_attention.kernels.masked.geometry import Geometry, geometry_of
from quorum_attention.kernels.masked.mask_fields import relative_band
from quorum_attention.kernels.masked.mask_numbers import (
    document_ids,
    kept_key_ids,
    query_offsets,
)
from quorum_attention.kernels.masked.rules import EqualIds, PlacesInBand, Rule
from quorum_attention.kernels.masked.token_rules import Ids
from quorum_attention.kernels.torch_private import no_torch_modes
from quorum_attention.mask import Mask

# Ids whose runs make more blocks than this many times the runs are compared pair by
# pair instead.
_BLOCKS_PER_RUN = 8
_FEW_BLOCKS = 4096

_ByEntry = Sequence[Geometry]


def geometries(mask: Mask, shape: CallShape, is_causal: bool) -> tuple[Geometry, ...]:
    """One geometry for each batch entry, or one for all of them.

    Raises:
        ValueError: a tensor of the mask does not fit the call, by name.
    """
    intersect = partial(_combined, Geometry.__and__)
    unite = partial(_combined, Geometry.__or__)
    with no_torch_modes():
        by_entry: _ByEntry = _geometries_of_fields(mask, shape, is_causal)
        if mask.keeps is not None:
            by_entry = intersect(by_entry, [geometry_of(mask.keeps)])
        for inner in mask.every:
            by_entry = intersect(by_entry, geometries(inner, shape, False))
        if mask.either:
            alternatives: list[_ByEntry] = [
                geometries(inner, shape, False) for inner in mask.either
            ]
            by_entry = intersect(by_entry, reduce(unite, alternatives))
    return tuple(by_entry)


def _combined(
    combine: Callable[[Geometry, Geometry], Geometry], first: _ByEntry, second: _ByEntry
) -> _ByEntry:
    """Two masks combined, entry by entry; the same objects give the same object."""
    combine = cache(combine)
    by_entry: list[Geometry] = []
    n_entries = max(len(first), len(second))
    for entry in range(n_entries):
        geometry = first[entry % len(first)]
        other_geometry = second[entry % len(second)]
        by_entry.append(combine(geometry, other_geometry))
    return by_entry


def _geometries_of_fields(mask: Mask, shape: CallShape, is_causal: bool) -> _ByEntry:
    """The geometries of a mask's own fields, without the masks that it holds."""
    if not shape.batch:
        return [Geometry()]
    by_query, key_ids = document_ids(mask, shape)
    by_key = kept_key_ids(mask, shape, key_ids)
    tables = (by_query, by_key, query_offsets(mask, shape))
    by_numbers: dict[bytes, Geometry] = {}
    by_entry: list[Geometry] = []
    n_entries = max(map(len, tables))
    for entry in range(n_entries):
        numbers = [table[entry % len(table)] for table in tables]
        contents = b"".join(row.tobytes() for row in numbers)
        if contents not in by_numbers:
            geometry = _geometry_of_numbers(mask, shape, is_causal, *numbers)
            by_numbers[contents] = geometry
        by_entry.append(by_numbers[contents])
    return by_entry if len(by_numbers) > 1 else by_entry[:1]


def _geometry_of_numbers(
    mask: Mask,
    shape: CallShape,
    is_causal: bool,
    by_query: Ids,
    by_key: Ids,
    offsets: Ids,
) -> Geometry:
    """The geometry of a batch entry.

    Args:
        by_query, by_key: ids, (n,) each; of keys ``NO_KEY`` in those that are left out.
        offsets: of the places of queries, (1,) or (n_queries,).
    """
    band = Band(None, 0) if is_causal else Band()
    band_of_places = relative_band(mask)
    if (offsets == offsets[:1]).all():
        offset = int(offsets[0]) if len(offsets) else 0
        band = band & band_of_places.moved(offset)
        band_of_places = Band()
    positions = Geometry(_within_call(band, shape))
    if mask.chunk is not None:
        places = np.arange(shape.n_queries) + offsets
        keys = np.arange(shape.n_keys)
        query_chunks = places // mask.chunk
        key_chunks = keys // mask.chunk
        positions = positions & _equal_ids(query_chunks, key_chunks)
    return positions & _equal_ids(by_query, by_key, band_of_places, offsets)


def _within_call(band: Band, shape: CallShape) -> Band:
    """A band without the bounds that cut nothing from a call."""
    low = band.low
    high = band.high
    if low is not None and low <= 1 - shape.n_queries:
        low = None
    if high is not None and high >= shape.n_keys - 1:
        high = None
    return Band(low, high)


_ALL_PAIRS = Band()
_NO_OFFSET = np.zeros(1, np.int64)


def _equal_ids(
    by_query: Ids, by_key: Ids, band: Band = _ALL_PAIRS, offsets: Ids = _NO_OFFSET
) -> Geometry:
    """Pairs of equal ids for which ``key - query - offset`` lies in a band, as blocks;
    as rules where there would be too many blocks."""
    rules: list[Rule] = [EqualIds(by_query, by_key)]
    query_runs = _runs(by_query)
    if not band.keeps_all:
        places = np.arange(len(by_query)) + offsets
        rules.append(PlacesInBand(places, len(by_key), band))
        query_runs = _runs(by_query, offsets)
    key_runs = _runs(by_key)
    pairs = _few_pairs_of_runs(by_query[query_runs.starts], by_key[key_runs.starts])
    if pairs is None:
        return Geometry(rules=tuple(rules))
    bounds = (
        query_runs.starts[pairs.queries],
        query_runs.stops[pairs.queries],
        key_runs.starts[pairs.keys],
        key_runs.stops[pairs.keys],
    )
    table = np.stack(bounds, axis=1)
    bands: list[Band] | None = None
    if not band.keeps_all:
        offset_of_run = offsets[query_runs.starts].tolist()
        run_bands = [band.moved(offset) for offset in offset_of_run]
        bands = [run_bands[run] for run in pairs.queries.tolist()]
    elif np.array_equal(table, [[0, len(by_query), 0, len(by_key)]]):
        return Geometry()
    return Geometry(blocks=Blocks(table, bands), block_rules=tuple(rules))


class _RunPairs(NamedTuple):
    """The runs of queries and the runs of keys that have equal ids, by ascending
    queries; their numbers, (pairs,) each."""

    queries: Ids
    keys: Ids


def _few_pairs_of_runs(query_ids: Ids, key_ids: Ids) -> _RunPairs | None:
    """The pairs of runs of equal ids; None where they are too many.

    Args:
        query_ids, key_ids: of each run.
    """
    order = np.argsort(key_ids, kind="stable")
    ordered_ids = key_ids[order]
    firsts = np.searchsorted(ordered_ids, query_ids, side="left")
    stops = np.searchsorted(ordered_ids, query_ids, side="right")
    counts = stops - firsts
    n_runs = len(query_ids) + len(key_ids)
    if counts.sum() > max(_FEW_BLOCKS, _BLOCKS_PER_RUN * n_runs):
        return None
    queries = np.repeat(np.arange(len(query_ids)), counts)
    places = consecutive(firsts, counts)
    return _RunPairs(queries, order[places])


class _TokenRuns(NamedTuple):
    """Runs of tokens, (n,) each."""

    starts: Ids
    stops: Ids


def _runs(*numbers: Ids) -> _TokenRuns:
    """The runs of tokens in which each of ``numbers`` stays equal."""
    starts = np.flatnonzero(begins_runs(*numbers))
    stops = np.append(starts, len(numbers[0]))[1:]
    return _TokenRuns(starts, stops)
