"""Where queries stand among the keys of their document, counted from the last ones."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


def offsets_from_last(by_query: Ids, by_key: Ids) -> Ids:
    """The place of each query among the keys, less its own number: (n_queries,).

    The last query of a document stands at the last key of the document, the query
    before at the key before, and so on. Queries that no key is left for stand before
    the first key, one by one.

    Args:
        by_query, by_key: (n_queries,) and (n_keys,), the ids of documents.
    """
    query_order = np.argsort(by_query, kind="stable")
    key_order = np.argsort(by_key, kind="stable")
    sorted_queries = by_query[query_order]
    sorted_keys = by_key[key_order]
    # How many queries of the document follow.
    query_stops = np.searchsorted(sorted_queries, sorted_queries, side="right")
    following = query_stops - 1 - np.arange(len(by_query))
    # Among the sorted keys: those of the document, and the one with as many that
    # follow, which may be before the first.
    first = np.searchsorted(sorted_keys, sorted_queries, side="left")
    stop = np.searchsorted(sorted_keys, sorted_queries, side="right")
    has_keys = first < stop
    if not has_keys.any():
        return np.zeros_like(by_query)
    partner = stop - 1 - following
    missing = np.maximum(first - partner, 0)[has_keys]
    nearest = np.maximum(partner, first)[has_keys]
    places = key_order[nearest] - missing
    queries = query_order[has_keys]
    # Queries without keys keep nothing, wherever they stand.
    offsets = np.full_like(by_query, places[0] - queries[0])
    offsets[queries] = places - queries
    return offsets
