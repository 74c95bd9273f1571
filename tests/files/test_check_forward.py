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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_only_rows_of_the_same_call_are_the_same(dtype: torch.dtype, spread: float) -> None:
    def check(call: WholeCall, read: Any, budget: int | None = None, blocks: int = 1) -> None:
        options = CallOptions(budget, devices=torch.device("cpu"))
        check_forward(call, Block(*(Interval(0, n) for n in (2, 4, N, M))), read, options, blocks)

    given = inputs(N, M, batch=(2,), heads=4, kv_heads=2, dtype=dtype, spread=spread)
    kept = torch.rand(4, N, M) > 0.5
    for mask, causal in product((None, qa.Mask(bias=kept)), (True, False)):
        named: dict[str, Any] = {"is_causal": causal, "enable_gqa": True, "kernel": "cpu"}
        out, lse = qa.attention_with_lse(*given.three, mask, **named)
        read = dict(zip(("query", "key", "value"), given.three, strict=True))
        read |= {"out": out, "lse": lse}
        call = WholeCall((2,), 4, 2, N, M, mask, causal)
        for budget in (None, 300_000):
            check(call, read, budget)
    for changed, tensors in (
        (call, {"lse": lse + 0.1}),
        (replace(call, scale=2 * 8**-0.5), {}),
        (replace(call, is_causal=True), {}),
        (replace(call, mask=qa.Mask(bias=~kept)), {}),
        (call, {"query": read["query"].flip(-1)}),
    ):
        for blocks in (1, 9) if spread == 1 else ():
            with pytest.raises(ValueError, match="another forward"):
                check(changed, {**read, **tensors}, blocks=blocks)
