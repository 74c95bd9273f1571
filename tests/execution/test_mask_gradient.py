"""The gradient of an additive mask: right for every tile, within its bytes, counted
once."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from helpers.attention import Inputs, assert_close, fresh_generator, inputs
from helpers.masks import exact
from helpers.memory import FailingAllocations, usage
from helpers.passes import pass_of, smallest_budget

import quorum_attention as qa
from quorum_attention.execution import mask_gradient as module
from quorum_attention.execution.bias import BiasView, bias_shape
from quorum_attention.execution.job import PassJob
from quorum_attention.execution.mask_gradient import (
    Tile,
    add_up_mask_gradient,
    fitting,
    tile_bytes,
)
from quorum_attention.execution.pass_spec import FORWARD
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.kernels import CallShape, DenseKernel, get_kernel
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.kernels.operator_call import Saved

pytestmark = pytest.mark.usefixtures("one_thread")
BATCH, HEADS, KV_HEADS, N, M = 2, 4, 2, 23, 31


def wanted(
    given: Inputs,
    mask: torch.Tensor,
    causal: bool = False,
    dropout: Dropout | None = None,
) -> torch.Tensor:
    """The textbook in float64."""
    bias = qa.Mask(bias=mask.detach().clone().requires_grad_())
    scale = given.query.shape[-1] ** -0.5
    return exact(
        *given.three, given.grad_out, bias, scale, is_causal=causal, dropout=dropout
    ).grads[3]


def a_mask(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    generator = fresh_generator()
    mask = torch.randn(shape, generator=generator, dtype=torch.float64)
    mask[torch.rand(shape, generator=generator) < 0.2] = -torch.inf
    return mask.to(dtype)


def a_call(
    mask_sizes: tuple[int, ...], dtype: torch.dtype, causal: bool = False,
    dropout: Dropout | None = None, **sizes: Any,
) -> tuple[Inputs, torch.Tensor, PassJob, Saved]:  # fmt: skip
    """Inputs, a mask of ``mask_sizes``, a forward by kernel "dense" and what it
    saved."""
    sizes = {"n_queries": N, "n_keys": M, "heads": HEADS, "kv_heads": KV_HEADS, **sizes}
    given = inputs(batch=(BATCH,), dtype=dtype, **sizes)
    mask = a_mask(mask_sizes, dtype)
    call: dict[str, Any] = {"is_causal": causal, "enable_gqa": True}
    if dropout is not None:
        call |= {"dropout_p": dropout.p, "dropout_seed": dropout.seed}
    out, lse = qa.attention_with_lse(*given.three, mask, **call)
    shape = CallShape(
        "cpu", batch_shape=(BATCH,), head_dim=8, value_dim=8, dtype=dtype, is_causal=causal,
        bias=bias_shape(mask, 1, dtype), **sizes,
    )  # fmt: skip
    problem = Problem(
        shape, get_kernel("dense"), FORWARD, Placement(True, False, dtype)
    )
    tensors = dict(zip(("query", "key", "value"), given.three, strict=True))
    view = BiasView(mask, 1)
    job = PassJob(problem, tensors, 8**-0.5, torch.device("cpu"), view, dropout=dropout)
    return given, mask, job, Saved(given.grad_out, out, lse)


SHAPES = list(itertools.product((1, BATCH), (1, HEADS), (1, N), (1, M)))
DROPS = Dropout(0.3, 2**40 + 17)
TILES = [
    (Tile(2, 64, 64), False, None), (Tile(2, 64, 40, 2), True, DROPS),
    (Tile(1, 5, 7), True, DROPS), (Tile(1, 23, 1), True, None), (Tile(2, 1, 40), False, DROPS),
]  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize(("tile", "causal", "dropout"), TILES, ids=str)
def test_every_way_to_broadcast_by_every_tile(
    tile: Tile, causal: bool, dropout: Dropout | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a mask broadcasts over is summed, whatever the tiles; nothing is left as it
    was."""
    monkeypatch.setattr(module, "fitting", lambda *_: tile)
    for shape in SHAPES:
        given, mask, job, upstream = a_call(shape, torch.float64, causal, dropout)
        target = torch.full(shape, torch.nan, dtype=torch.float64)
        assert add_up_mask_gradient(job, upstream, target, None) == []
        assert_close(target, wanted(given, mask, causal, dropout), 1e-12)


def test_sixteen_bits_lose_nothing_by_the_rounding_of_the_output() -> None:
    """Rows with nearly all weight on one key: delta comes from probabilities."""
    given = inputs(40, dtype=torch.bfloat16, spread=30.0)
    mask = torch.zeros(40, 40, dtype=torch.bfloat16)
    out, lse = qa.attention_with_lse(*given.three, mask)
    *_, found = qa.attention_backward(
        given.grad_out, *given.three, out, lse, mask, grad_mask=torch.empty(40, 40)
    )
    assert_close(found, wanted(given, mask), 1e-3)


@pytest.mark.slow_but_first
@pytest.mark.parametrize(
    ("mask_sizes", "dtype", "limit"),
    [((2, 8, 300, 400), torch.float32, 4_000_000), ((300, 1), torch.bfloat16, 200_000),
     ((1, 8, 1, 400), torch.float32, 300_000), ((2, 8, 300, 400), torch.bfloat16, 300_000)],
    ids=str,
)  # fmt: skip
def test_tiles_stay_within_their_bytes(
    mask_sizes: tuple[int, ...], dtype: torch.dtype, limit: int
) -> None:
    sizes = {"n_queries": 300, "n_keys": 400, "heads": 8, "kv_heads": 4}
    _, mask, job, upstream = a_call(mask_sizes, dtype, causal=True, **sizes)
    shape, target = job.problem.shape, torch.empty_like(mask)
    tile = fitting(shape, job.device, limit, mask.element_size())
    assert tile_bytes(shape, tile, mask.element_size()) <= limit
    used = usage(lambda: add_up_mask_gradient(job, upstream, target, limit))
    assert used.peak <= limit
    assert used.left <= 0


def test_a_failed_block_is_computed_once() -> None:
    """Wherever memory runs out, a block begins anew with smaller tiles; nothing counts
    twice."""
    for shape in ((2, 4, N, M), (1, 4, 1, M), (1, 1, N, 1)):
        given, mask, job, upstream = a_call(shape, torch.float64)
        expected = wanted(given, mask)
        for first in range(1, 60, 9):
            target = torch.full(shape, torch.nan, dtype=torch.float64)
            with FailingAllocations(first, count=2) as sabotage:
                lines = add_up_mask_gradient(job, upstream, target, None)
            assert_close(target, expected, 1e-12)
            assert bool(lines) == (sabotage.seen >= first)
            assert all("mask gradient out of memory" in line for line in lines)


def test_kernels_of_other_functions_are_refused_by_name() -> None:
    class Another(DenseKernel):
        name = "another"
        own_attention = True

    given, mask = inputs(20), torch.randn(20, 20, requires_grad=True)
    with pytest.raises(
        NotImplementedError, match="kernel 'another' has no gradient of attn_mask"
    ):
        qa.attention(*given.three, mask, kernel=Another())


def test_a_budget_counts_it_and_names_the_smallest_that_works() -> None:
    given, mask = inputs(500, heads=4, head_dim=16), torch.randn(4, 500, 500)
    run = pass_of(given, True, attn_mask=mask)
    smallest = [
        smallest_budget(lambda most, wish=wish: run(grad_mask=wish, budget=most))
        for wish in (False, torch.empty_like(mask), True)
    ]
    assert smallest[1] == smallest[0]
    assert smallest[2] == smallest[0] + mask.nbytes
    leaf = mask.clone().requires_grad_()
    with pytest.raises(
        qa.BudgetError, match=r"mask's gradient 3\.81 MiB, and beside"
    ) as said:
        qa.attention(*given.three, leaf, budget=smallest[2] - 1)
    assert said.value.smallest_bytes == smallest[2]
    assert usage(lambda: run(grad_mask=True, budget=smallest[2])).peak <= smallest[2]
