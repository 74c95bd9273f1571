"""A log-sum-exp that comes from elsewhere is told from that of another call."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from typing import Any

import pytest
import torch
from helpers_attention import inputs

import quorum_attention as qa
from quorum_attention.call.block import Block, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.passes import check_forward

N, M = 70, 90
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
BLOCK = Block(*(Interval(0, n) for n in (2, 4, N, M)))


def a_call(
    dtype: torch.dtype, *, causal: bool = False, masked: bool = False, spread: float = 1.0
) -> tuple[WholeCall, dict[str, torch.Tensor]]:
    given = inputs(N, M, batch=(2,), heads=4, kv_heads=2, dtype=dtype, spread=spread)
    mask = qa.Mask(bias=torch.rand(4, N, M) > 0.5) if masked else None
    out, lse = qa.attention_with_lse(
        *given.three, mask, is_causal=causal, enable_gqa=True, kernel="cpu"
    )
    read = dict(zip(("query", "key", "value"), given.three, strict=True)) | {"out": out, "lse": lse}
    return WholeCall((2,), 4, 2, N, M, mask, causal), read


def check(call: WholeCall, read: Any, budget: int | None = None, blocks: int = 1) -> None:
    check_forward(call, BLOCK, read, CallOptions(budget, devices=torch.device("cpu")), blocks)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_rows_of_the_same_call_are_the_same(dtype: torch.dtype, spread: float) -> None:
    for causal in (False, True):
        for masked in (False, True):
            call, read = a_call(dtype, causal=causal, masked=masked, spread=spread)
            for budget in (None, 300_000, None):
                check(call, read, budget)


@pytest.mark.parametrize("dtype", DTYPES)
def test_other_results_are_not_those_of_the_call(dtype: torch.dtype) -> None:
    call, read = a_call(dtype, masked=True)
    assert call.mask is not None
    assert call.mask.bias is not None
    other = [
        (call, {"lse": read["lse"] + 0.1}),
        (replace(call, scale=2 * 8**-0.5), {}),
        (replace(call, is_causal=True), {}),
        (replace(call, mask=qa.Mask(bias=~call.mask.bias)), {}),
        (call, {"query": read["query"].flip(-1)}),
    ]
    for (changed, tensors), blocks in product(other, (1, 9)):
        with pytest.raises(ValueError, match="another forward"):
            check(changed, {**read, **tensors}, blocks=blocks)
