"""Every way gives each pair to one rank, evenly, and moves as many bytes as its formula
says."""

from __future__ import annotations

import random
from functools import cache
from itertools import accumulate, chain, product

import numpy as np
import pytest
import torch
from helpers.masks import dense
from helpers.plans import shape_of

from quorum_attention import Mask
from quorum_attention.distributed.assignment import Operand, RowBytes
from quorum_attention.distributed.sharded_mask import count_kept_pairs
from quorum_attention.distributed.sharded_shape import ShardedShape
from quorum_attention.distributed.strategies import (
    all_assignments,
    choose_assignment,
    exchange_heads,
    gather_kv,
    quorum_tasks,
)

# One for each vector of a query, and of a key and a value; results likewise.
ELEMENTS = RowBytes(1, 2, 1, 1)


def sharded_shape(
    sizes: list[int], heads: int, kv_heads: int, causal: bool
) -> ShardedShape:
    return ShardedShape((0, *accumulate(sizes)), heads, kv_heads, causal)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(30))
def test_every_pair_is_computed_once(seed: int) -> None:
    draw = random.Random(seed)
    ranks, kv_heads = draw.randint(2, 9), draw.randint(1, 4)
    sizes = [draw.choice([0, 1, 5, 7, draw.randint(1, 40)]) for _ in range(ranks)]
    sizes[0] += 1
    shape = sharded_shape(
        sizes, kv_heads * draw.randint(1, 4), kv_heads, draw.random() < 0.5
    )
    wanted = np.ones((shape.n_tokens, shape.n_tokens), int)
    wanted = np.tril(wanted) if shape.is_causal else wanted
    for way in all_assignments(shape):
        seen = np.zeros((shape.heads, shape.n_tokens, shape.n_tokens), int)
        for stages in way.shares:
            before: set[int] = set()
            for blocks in stages:
                read: set[int] = set()
                for block in blocks:
                    read |= set(range(*shape.kv_of(block.heads)))
                    for k in block.keys:
                        part = np.ones((block.queries.length, k.length), int)
                        rows = slice(*block.queries)
                        seen[slice(*block.heads), rows, slice(*k)] += (
                            np.tril(part) if block.causal else part
                        )
                assert not read & before, "two stages of a rank read the same heads"
                before |= read
        assert (seen == wanted).all(), way.way
        assert sum(way.n_pairs(rank) for rank in range(ranks)) == shape.n_pairs


@pytest.mark.slow_but_first
@pytest.mark.parametrize("seed", range(20))
def test_pieces_bring_what_blocks_read(seed: int) -> None:
    """Each needed row comes once, from the rank that holds it, and is exclusive only if
    it is."""
    draw = random.Random(seed)
    ranks, kv_heads = draw.randint(2, 7), draw.randint(1, 3)
    sizes = [draw.randint(0, 30) for _ in range(ranks - 1)] + [9]
    shape = sharded_shape(
        sizes, kv_heads * draw.randint(1, 3), kv_heads, draw.random() < 0.5
    )
    for way in all_assignments(shape):
        users: dict[tuple[Operand, int, int], set[int]] = {}
        brought: set[tuple[int, int, Operand, int, int]] = set()
        for p in way.row_slices:
            low, high = shape.starts[p.owner : p.owner + 2]
            assert low <= p.rows.start < p.rows.stop <= high
            for head, row in product(range(*p.head_slice.heads), range(*p.rows)):
                one = (p.rank, p.stage, p.operand, head, row)
                assert one not in brought
                brought.add(one)
                users.setdefault((p.operand, head, row), set()).add(p.rank)
        wanted = {
            (rank, stage, head_slice.operand, head, row)
            for rank, stages in enumerate(way.shares)
            for stage in range(len(stages))
            for head_slice, runs in way.rows_needed(rank, stage).items()
            for head in range(*head_slice.heads)
            for rows in runs
            for row in range(*rows)
        }
        assert brought == wanted
        for p in way.row_slices:
            several = len(users[p.operand, p.head_slice.heads.start, p.rows.start]) > 1
            assert p.is_exclusive != several


@pytest.mark.parametrize("ranks", [2, 3, 4, 7, 31])
@pytest.mark.parametrize("share", [1, 8])
def test_bytes_are_those_of_the_formulas(ranks: int, share: int) -> None:
    """Received in a forward, in units of tokens times query heads: away are (ranks - 1)
    / ranks of the rows, or of the chunks of a task."""
    tokens = ranks * 128 * 70
    shape = sharded_shape([tokens // ranks] * ranks, ranks * share, ranks, False)
    away, unit = (ranks - 1) / ranks, tokens * shape.heads
    exchanged = (2 + 2 / share) * away / ranks
    assert exchange_heads(shape).most_received(ELEMENTS) / unit == pytest.approx(
        exchanged
    )
    assert gather_kv(shape).most_received(ELEMENTS) / unit == pytest.approx(
        2 * away / share
    )
    size = {3: 2, 7: 3, 31: 6}.get(ranks)
    if size:
        foreign = (size - 1) / ranks
        moved = 2 * foreign + 2 * foreign / share
        assert quorum_tasks(shape, ranks).most_received(
            ELEMENTS
        ) / unit == pytest.approx(moved)


@pytest.mark.slow_but_first
@pytest.mark.parametrize("ranks", [2, 3, 5, 8])
@pytest.mark.parametrize("heads_", [1, 3, 5, 8])
@pytest.mark.parametrize("causal", [False, True])
def test_work_is_shared_evenly_whatever_divides(
    ranks: int, heads_: int, causal: bool
) -> None:
    draw = random.Random(ranks * heads_)
    sizes = [draw.randint(20_000, 200_000) for _ in range(ranks)]
    shape = sharded_shape(sizes, heads_, 1, causal)
    assert choose_assignment(shape, ELEMENTS).imbalance <= 1.05


TOKENS = 4096
FALLING = torch.repeat_interleave(
    torch.arange(8), torch.tensor([911, 796, 683, 569, 455, 341, 228, 113])
)
MASKS = {
    "causal, sinks": Mask(causal=True, sinks=torch.zeros(5)),
    "window": Mask(causal=True, window=(127, 0)),
    "wide window": Mask(window=(3000, 500)),
    "equal documents": Mask(documents=torch.arange(TOKENS) // 512),
    "falling documents": Mask(documents=FALLING),
    "causal, falling documents, short": Mask(
        causal=True, documents=FALLING, key_lengths=torch.tensor([TOKENS, 3000])
    ),
    "offset": Mask(causal=True, offset=-700),
    "chunks": Mask(causal=True, chunk=1000),
}


@cache
def pairs_above(name: str) -> np.ndarray:
    """Count the pairs that a mask keeps above each row, of both batch entries."""
    pairs_by_row = dense(MASKS[name], 2, 1, TOKENS, TOKENS).sum((0, 1, 3))
    return np.array([0, *pairs_by_row.cumsum(0).tolist()])


@pytest.mark.slow_but_first
@pytest.mark.parametrize("name", MASKS)
@pytest.mark.parametrize("heads_", [1, 5])
def test_kept_pairs_are_shared_evenly(name: str, heads_: int) -> None:
    mask = MASKS[name]
    above = pairs_above(name)
    kept_pairs = count_kept_pairs(mask, shape_of((2,), heads_, heads_, TOKENS, TOKENS))
    entries = 1 if mask.key_lengths is None else 2  # of different pairs
    assert kept_pairs[-1] * 2 == above[-1] * entries
    for ranks in (2, 5, 8):
        sizes = [TOKENS // ranks] * (ranks - 1) + [
            TOKENS - TOKENS // ranks * (ranks - 1)
        ]
        shape = ShardedShape(
            (0, *accumulate(sizes)), heads_, 1, False, "rows", kept_pairs=kept_pairs
        )
        way = choose_assignment(shape, ELEMENTS)
        work = [
            sum(
                block.heads.length * np.diff(above[list(block.queries)])[0]
                for block in chain(*shares)
            )
            for shares in way.shares
        ]
        assert max(work) * ranks / sum(work) <= 1.05, ranks
        assert way.imbalance <= 1.05
