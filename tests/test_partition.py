"""Shares of a call's work: every row of every head is in one of them, and they are
even.

Devices, ranks and files cut calls by ``partition.py``.
"""

from __future__ import annotations

import random
from fractions import Fraction

import pytest

from quorum_attention.decomposition.bands import Band
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.partition import (
    RowBlock,
    RowWork,
    cut_line,
    split_at_multiples,
    split_groups,
)


def row_work(n_rows: int, tile: int, *, causal: bool) -> RowWork:
    band = Band(high=0 if causal else None)
    return RowWork(n_rows, tile, lambda row: band.count(0, row, 0, n_rows))


def rows_of(blocks: list[RowBlock]) -> list[tuple[int, int]]:
    """Head and row of each row of blocks, in their order."""
    return [
        (head, row)
        for block in blocks
        for head in range(*block.heads)
        for row in range(*block.rows)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_shares_have_each_row_once_and_as_much_work_as_they_should(seed: int) -> None:
    draw = random.Random(seed)
    n_heads = draw.randint(1, 7)
    n_rows = draw.choice([1, 5, 64, 300])
    tile = draw.choice([1, 16, n_rows])
    work = row_work(n_rows, tile, causal=draw.random() < 0.5)
    inner = sorted(
        Fraction(draw.randint(0, n_heads * 12), 12) for _ in range(draw.randint(0, 5))
    )
    cuts = [Fraction(0), *inner, Fraction(n_heads)]
    shares = cut_line(work, cuts)
    assert len(shares) == len(cuts) - 1
    rows = [row for share in shares for row in rows_of(share)]
    assert rows == [(head, row) for head in range(n_heads) for row in range(n_rows)]
    all_pairs = work.pairs_above(n_rows)
    for share, low, high in zip(shares, cuts, cuts[1:], strict=False):
        pairs = sum(block.heads.length * work.pairs(block.rows) for block in share)
        # Each end is moved by half a tile at most.
        assert abs(pairs - (high - low) * all_pairs) <= (min(tile, n_rows) + 1) * n_rows
        for block in share:
            assert block.heads.length == 1 or block.rows == (0, n_rows)


def test_equal_shares_end_between_heads_where_the_heads_divide() -> None:
    """Also where thirds are no numbers that a float can hold."""
    work = row_work(1 << 20, 128, causal=True)
    shares = cut_line(work, [Fraction(21 * number, 3) for number in range(4)])
    all_rows = Interval(0, 1 << 20)
    assert shares == [
        [RowBlock(Interval(7 * n, 7 * n + 7), all_rows)] for n in range(3)
    ]


@pytest.mark.parametrize("seed", range(50))
def test_runs_have_whole_key_heads_or_a_part_of_one(seed: int) -> None:
    draw = random.Random(seed)
    size = draw.randint(1, 6)
    start = draw.randint(0, 30)
    heads = Interval(start, start + draw.randint(0, 30))
    n_runs = draw.randint(1, 4)
    runs = split_groups(heads, size, n_runs)
    assert [head for run in runs for head in range(*run)] == list(range(*heads))
    whole = [run for run in runs if run.start % size == run.stop % size == 0]
    assert len(whole) <= n_runs
    for run in runs:
        assert run in whole or run.start // size == (run.stop - 1) // size


def test_spans_are_cut_at_multiples() -> None:
    assert split_at_multiples(Interval(3, 10), 4) == [(3, 4), (4, 8), (8, 10)]
    assert split_at_multiples(Interval(4, 8), 4) == [(4, 8)]
    assert split_at_multiples(Interval(5, 5), 4) == []
