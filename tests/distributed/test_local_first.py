"""Own triangles first, rectangles shared by heads: exact, and as many bytes as the formula says."""

from __future__ import annotations

from importlib import import_module
from itertools import accumulate
from pathlib import Path
from typing import NoReturn

import pytest
import torch
import torch.distributed as dist
from helpers_ranks import TOLERANCES, compare, exact, inputs_of, spawn

from quorum_attention import distributed as sharded
from quorum_attention.distributed import whole_heads
from quorum_attention.distributed.assignment import Sequences, forward_bytes
from quorum_attention.distributed.calls import Calls
from quorum_attention.distributed.ways import heads as heads_exchanged
from quorum_attention.distributed.ways import hides_more, local_first

# Of the package's function's name: the module has to be asked for.
attention = import_module("quorum_attention.distributed.attention")


def _forced() -> None:
    """Taken wherever it is possible, also where the exchange of heads would be as quick."""
    attention._LOCAL_FIRST = (torch.bfloat16, torch.float32, torch.float64)
    attention.hides_more = lambda *of: True
    whole_heads.WORTH_IT = 0.0
    attention.on_host = lambda device: False
    attention._WIDENED_PAIRS = 0
    attention._decided.cache_clear()


def _all_of_it(rank: int) -> None:
    _forced()
    groups = {n: dist.new_group(list(range(n))) for n in (2, 3, 4, 7)}
    for ranks, group in groups.items():
        if rank < ranks:
            _calls(rank, ranks, group)
    # Whoever ends takes its messages with it, and others then need not wait to learn of it.
    dist.barrier()


def _calls(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    for number, (rows, kv_heads, share, dim, value_dim, dtype, batch) in enumerate(
        (
            (24, 2, 2, 16, 8, torch.float64, 1),
            (16, 4, 1, 8, 16, torch.float32, 2),
            (32, 2, 1, 16, 16, torch.bfloat16, 1),
        )
    ):
        torch.manual_seed(number)
        sizes, kv_heads = [rows] * ranks, kv_heads * ranks
        heads = kv_heads * share
        tensors = inputs_of(heads, kv_heads, sum(sizes), dim, value_dim, dtype, batch)
        # With gradients heads are exchanged; without them ranks begin with what is theirs, the
        # first time, agreed on, and remembered.
        report = compare(rank, sizes, tensors, True, lengths=sizes, group=group)
        assert report.way == "heads exchanged"
        mine = [t[:, :, rank * rows : rank * rows + rows] for t in tensors[:3]]
        true = exact(tensors, True)[0][:, :, rank * rows : rank * rows + rows]
        for options in ({}, {}, *[{"lengths": sizes}] * 4, {"lengths": "equal", "report": report}):
            for scale in (1, -1):
                q, k, v = mine[0], mine[1], mine[2] * scale
                out = sharded.attention(
                    q, k, v, is_causal=True, enable_gqa=True, group=group, **options
                )
                error = float((out.double() - scale * true).abs().max() / true.abs().max())
                assert out.dtype == dtype
                assert error < TOLERANCES[dtype], (error, dtype, options)
        assert report.way == "local first"
        # Of each later rank queries, of each earlier one keys and values; of half the heads.
        later, earlier, unit = ranks - 1 - rank, rank, batch * rows * kv_heads // 2
        element, lse = dtype.itemsize, max(4, dtype.itemsize)
        come = later * share * dim * element + earlier * (dim + value_dim) * element
        back = earlier * share * (value_dim * element + lse)
        assert report.forward_bytes == unit * (come + back)
        made = local_first(Sequences((0, *accumulate(sizes)), heads, kv_heads, True))
        assert made is not None
        of = forward_bytes(dim, value_dim, element, lse)
        of = of._replace(query=of.query._replace(partial=of.query.alone))
        counted = [made.received(one, of) for one in range(ranks)]
        assert report.forward_bytes == batch * counted[rank]
        assert report.most_forward_bytes == max(counted)
    if ranks < 4:
        _one_fails(rank, ranks, group)


def _one_fails(rank: int, ranks: int, group: dist.ProcessGroup) -> None:
    """All ranks raise in the call in which one fails, and the group can be used again."""
    torch.manual_seed(1)
    q, k, v = (torch.randn(1, 2 * ranks, 8, 8) for _ in range(3))
    kept = Calls._forward

    def failing(*args: object) -> NoReturn:
        raise ArithmeticError("planted")

    if rank == ranks - 1:
        Calls._forward = failing  # type: ignore[method-assign]
    try:
        with pytest.raises((ArithmeticError, RuntimeError), match="planted"):
            sharded.attention(q, k, v, is_causal=True, lengths="equal", group=group)
    finally:
        Calls._forward = kept  # type: ignore[method-assign]
    out = sharded.attention(q, k, v, is_causal=True, lengths="equal", group=group)
    assert out.isfinite().all()


def test_on_processes(tmp_path: Path) -> None:
    """Groups of 2, 3, 4 and 7 of the same processes, because processes take long to start."""
    spawn(_all_of_it, 7, tmp_path)


@pytest.mark.parametrize("ranks", [2, 3, 7, 31])
@pytest.mark.parametrize(("n_heads", "kv_heads"), [(4, 1), (8, 8), (64, 8)])
def test_shares_are_equal_and_have_every_pair(ranks: int, n_heads: int, kv_heads: int) -> None:
    of = Sequences(tuple(256 * n for n in range(ranks + 1)), n_heads, kv_heads, True)
    made = local_first(of)
    assert made is not None
    assert made.imbalance < 1.001
    assert sum(made.pairs(rank) for rank in range(ranks)) == of.pairs


def test_where_it_is_not_possible() -> None:
    assert local_first(Sequences((0, 8, 16), 3, 3, True)) is None
    assert local_first(Sequences((0, 8, 16), 6, 3, True)) is None, "a group of heads would be cut"
    assert local_first(Sequences((0, 8, 16), 4, 4, False)) is None
    assert local_first(Sequences((0, 2, 16), 4, 4, True)) is None, "uneven shards"
    assert local_first(Sequences((0, 8, 16), 4, 4, True, "rows")) is None


def test_taken_where_messages_are_much_of_a_call() -> None:
    def better(a_rank: int, n_heads: int, kv_heads: int, ranks: int = 2) -> bool:
        of = Sequences(tuple(a_rank * n for n in range(ranks + 1)), n_heads, kv_heads, True)
        moved = heads_exchanged(of).most_received(forward_bytes(128, 128, 2, 0))
        return hides_more(of, moved, 2, 256, 512.0)

    assert better(8192, 64, 8)
    assert not better(65536, 32, 8)
    assert not better(524288, 8, 8)
    assert not better(8192, 64, 8, ranks=8), "seven parts of a row are more to merge than to move"
