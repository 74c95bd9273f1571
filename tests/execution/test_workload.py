"""The sizes of a call; its head groups cover every head exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import product

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.execution.problem import (
    GroupSize,
    Workload,
    count_groups,
    group_sizes,
    groups,
)

WORK = Workload((1,), 4, 2, 100, 100, 16, 24, torch.float16, False)


@st.composite
def works(draw) -> Workload:  # type: ignore[no-untyped-def]
    batch = tuple(draw(st.lists(st.integers(0, 4), max_size=3)))
    kv_heads, shared = draw(st.integers(0, 6)), draw(st.integers(1, 4))
    return replace(WORK, batch_shape=batch, kv_heads=kv_heads, heads=kv_heads * shared)


@settings(max_examples=80, deadline=None)
@given(work=works(), batch=st.integers(1, 5), kv_heads=st.integers(1, 6))
def test_every_head_of_every_entry_is_in_one_group(work, batch: int, kv_heads: int) -> None:  # type: ignore[no-untyped-def]
    sizes = [GroupSize(batch, kv_heads), *group_sizes(work)]
    for size in sizes:
        found = list(groups(work, size))
        assert len(found) == count_groups(work, size)
        keys: Counter[tuple[tuple[int, ...], int]] = Counter()
        queries: Counter[tuple[tuple[int, ...], int]] = Counter()
        for group in found:
            assert 1 <= len(group.entries) <= size.batch
            assert 1 <= group.kv_stop - group.kv_start <= size.kv_heads
            for entry in group.entries:
                keys.update((entry, h) for h in range(work.kv_heads)[group.key_heads])
                queries.update((entry, h) for h in range(work.heads)[group.query_heads])
        entries = list(product(*map(range, work.batch_shape)))
        assert keys == Counter(product(entries, range(work.kv_heads)))
        assert queries == Counter(product(entries, range(work.heads)))


@settings(max_examples=80, deadline=None)
@given(work=works())
def test_sizes_go_down_from_everything_to_one_head(work) -> None:  # type: ignore[no-untyped-def]
    sizes = group_sizes(work)
    if work.batch == 0 or work.kv_heads == 0:
        assert sizes == []
        return
    assert sizes[0] == GroupSize(work.batch, work.kv_heads)
    assert sizes[-1] == GroupSize(1, 1)
    heads = [size.batch * size.kv_heads for size in sizes]
    assert heads == sorted(set(heads), reverse=True)
    # A group is several whole entries, or some heads of one.
    assert all(size.batch == 1 or size.kv_heads == work.kv_heads for size in sizes)


@settings(max_examples=60, deadline=None)
@given(n_queries=st.integers(0, 40), n_keys=st.integers(0, 40), is_causal=st.booleans())
def test_pairs_are_those_of_the_mask(n_queries: int, n_keys: int, is_causal: bool) -> None:
    work = replace(WORK, n_queries=n_queries, n_keys=n_keys, is_causal=is_causal)
    kept = torch.ones(n_queries, n_keys)
    assert work.pairs == int((kept.tril() if is_causal else kept).sum())
    assert work.n_tokens == max(n_queries, n_keys)
