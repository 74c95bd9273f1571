"""Dense counts and a token-by-token reference that decompositions are held against."""

from __future__ import annotations

import itertools
from collections.abc import Iterable

import numpy as np
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition, Rectangle, Task
from quorum_attention.quorums import interest_set, quorum_size

MAX_TASKS = 150

LEVELS = [
    levels
    for depth in range(4)
    for levels in itertools.product((1, 3, 7, 13, 21), repeat=depth)
    if np.prod(levels, dtype=int) <= MAX_TASKS
]


def decompositions(max_tokens: int = 150) -> st.SearchStrategy[Decomposition]:
    """Any length, mix of levels, layout and tile that is cheap to count out."""
    return st.builds(
        Decomposition,
        st.integers(0, max_tokens),
        st.sampled_from(LEVELS),
        st.sampled_from(["aligned", "balanced"]),
        st.sampled_from([1, 4, 16, 128]),
    )


def positions(task: Task) -> np.ndarray:
    """Global position of every local token."""
    return np.array([p for s in task.spans for p in range(s.start, s.stop)], dtype=int)


def bits(task: Task) -> np.ndarray:
    """Group bits of every local token, as Python integers."""
    return np.array(
        [s.bits for s in task.spans for _ in range(s.start, s.stop)], dtype=object
    )


def kept_pairs(
    task: Task, is_causal: bool, n_queries: int | None = None, n_keys: int | None = None
) -> np.ndarray:
    """Dense (tokens, tokens) of what the task must compute, from the mask."""
    where = positions(task)
    kept = task.mask().copy()
    if is_causal:
        kept &= where[:, None] >= where[None, :]
    if n_queries is not None:
        kept &= where[:, None] < n_queries
    if n_keys is not None:
        kept &= where[None, :] < n_keys
    return kept


def count_rectangles(rectangles: Iterable[Rectangle], n_tokens: int) -> np.ndarray:
    """How often each local pair is in a rectangle; checks each one's form."""
    counts = np.zeros((n_tokens, n_tokens), dtype=int)
    for r in rectangles:
        assert 0 <= r.query_start < r.query_stop <= n_tokens
        assert 0 <= r.key_start < r.key_stop <= n_tokens
        part = np.ones((r.n_queries, r.n_keys), dtype=int)
        if r.causal:
            assert (r.query_start, r.query_stop) == (r.key_start, r.key_stop)
            part = np.tril(part)
        assert r.pairs == part.sum()
        counts[r.query_start : r.query_stop, r.key_start : r.key_stop] += part
    return counts


def build_subseq(
    n_tokens: int, levels: tuple[int, ...], path: tuple[int, ...]
) -> tuple[list[int], list[frozenset[tuple[int, int]]]]:
    """The paper's BuildSubseq for one quorum tuple, token by token, chunks in ascending
    order.

    Returns the global positions, and for each the non-owner chunks (level, chunk) it
    lies in.
    """
    token_ids = list(range(n_tokens))
    groups: list[frozenset[tuple[int, int]]] = [frozenset()] * n_tokens
    for level, (c, owner) in enumerate(zip(levels, path, strict=True)):
        labels: list[int] = []
        for chunk in range(c):  # BalancedChunkLayout
            longer = chunk < len(token_ids) % c
            labels += [chunk] * (len(token_ids) // c + longer)
        chunks = {(owner + o) % c for o in interest_set(quorum_size(c))}
        gather_idx = [local for local, chunk in enumerate(labels) if chunk in chunks]
        groups = [
            groups[i] if labels[i] == owner else groups[i] | {(level, labels[i])}
            for i in gather_idx
        ]
        token_ids = [token_ids[i] for i in gather_idx]
    return token_ids, groups
