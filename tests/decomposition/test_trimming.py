"""Trimmed tasks: no pair that counts is lost, no token either, and little else is
held."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.decomposition import bits, decompositions, kept_pairs, positions
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import (
    EMPTY,
    FULL,
    PARTIAL,
    Decomposition,
    Pairs,
    Ranges,
    Task,
    Verdict,
)
from quorum_attention.decomposition.trimming import trimmed

MASKS = {
    "window": lambda q, k: (q - k <= 9) & (k - q <= 3),
    "documents": lambda q, k: q // 23 == k // 23,
    "two far ones": lambda q, k: (q // 10 == 11) & (k // 10 == 2),
    "nothing": lambda q, k: (q < 0) & (k < 0),
    "everything": lambda q, k: (q >= 0) & (k >= 0),
}


def by_looking(mask):  # type: ignore[no-untyped-def]
    """A verdict that is right whenever it is sure, and as sure as can be."""

    def verdict(r: Ranges) -> Verdict:
        q = np.arange(*r.queries)[:, None]
        k = np.arange(*r.keys)[None]
        kept = np.broadcast_to(mask(q, k), (q.size, k.size))
        return FULL if kept.all() else PARTIAL if kept.any() else EMPTY

    return verdict


def kept(task: Task, pairs: Pairs, mask) -> set[tuple[int, int]]:  # type: ignore[no-untyped-def]
    """Every pair of global positions that a task has to compute."""
    where = positions(task)
    found = kept_pairs(task, pairs.is_causal, pairs.n_queries, pairs.n_keys)
    if mask is not None:
        found &= mask(where[:, None], where[None])
    rows, columns = np.nonzero(found)
    return set(zip(where[rows].tolist(), where[columns].tolist(), strict=True))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    decomposition=decompositions(),
    name=st.sampled_from([None, *MASKS]),
    is_causal=st.booleans(),
    fewer=st.integers(0, 150),
    keys=st.booleans(),
)
def test_no_pair_and_no_token_is_lost(
    decomposition, name, is_causal, fewer, keys
) -> None:
    n, less = decomposition.n_tokens, max(0, decomposition.n_tokens - fewer)
    mask = None if name is None else MASKS[name]
    verdict = None if mask is None else by_looking(mask)
    pairs = (
        Pairs(n, less, is_causal, verdict)
        if keys
        else Pairs(less, n, is_causal, verdict)
    )
    tasks = list(decomposition.tasks())
    found = trimmed(tasks, pairs, decomposition.tile, n)
    left = {task.path: task for task in found}
    assert list(left) == [task.path for task in tasks if task.path in left]  # in order
    for task in tasks:
        after = left.get(task.path, Task(task.path, ()))
        assert kept(after, pairs, mask) == kept(task, pairs, mask)
        before = dict(zip(positions(task).tolist(), bits(task).tolist(), strict=True))
        for position, group in zip(
            positions(after).tolist(), bits(after).tolist(), strict=True
        ):
            assert before[position] == group
    if n:
        tokens = {p for task in found for p in positions(task).tolist()}
        assert tokens == set(range(n))


@pytest.mark.parametrize("levels", [(7,), (13,), (7, 7)])
def test_a_window_leaves_what_a_task_owns_and_its_edges(levels) -> None:
    n, window = 1 << 17, 1024
    decomposition = Decomposition(n, levels, "aligned", 128)
    asked = []

    def verdict(r: Ranges) -> Verdict:
        asked.append(r)
        near, far = (
            r.queries.start - (r.keys.stop - 1),
            r.queries.stop - 1 - r.keys.start,
        )
        return EMPTY if near > window or far < 0 else PARTIAL

    found = trimmed(list(decomposition.tasks()), Pairs(n, n, True, verdict), 128, n)
    before = sum(task.n_tokens for task in decomposition.tasks())
    assert before > 2.9 * n
    assert sum(task.n_tokens for task in found) < 1.35 * n
    assert max(task.n_tokens for task in found) < 0.5 * decomposition.max_task_tokens
    assert all(start % 128 == 0 for task in found for start, _, _ in task.runs)
    # The border's length counts, not the area.
    assert len(asked) < 2000 * len(found)
