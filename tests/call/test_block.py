"""Blocks of a call, computed one by one and put together, are the call."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.attention import inputs
from helpers.conformance import NAMES, Case
from helpers.plans import shape_of

import quorum_attention as qa
from quorum_attention import Mask
from quorum_attention.call.block import CallBlock, WholeCall
from quorum_attention.call.options import CallOptions
from quorum_attention.decomposition.intervals import Interval
from quorum_attention.kernels.dropout import Dropout
from quorum_attention.passes.block_call import check_forward, compute_block

pytestmark = pytest.mark.usefixtures("one_thread")
ON_CPU = CallOptions(devices=torch.device("cpu"))


@pytest.mark.slow_but_first
@pytest.mark.parametrize("first", range(0, 100, 25))
def test_blocks_together_are_the_call(first: int) -> None:
    """Short random calls, cut anywhere along entries, heads, rows and keys."""
    for seed in range(first, first + 25):
        print("seed", seed)
        case = Case(seed)
        if max(t.shape[-2] for t in case.inputs) > 160:
            continue
        if seed % 5 == 0:  # seldom drawn
            case.mask = replace(
                case.mask if isinstance(case.mask, Mask) else Mask(), chunk=7
            )
        query, key, value, grad_out = case.inputs
        (*batch, heads, n, _), (kv_heads, m, _) = query.shape, key.shape[-3:]
        if isinstance(case.mask, torch.Tensor):
            case.mask = Mask(bias=case.mask)
        p, of = (case.options.get(name) for name in ("dropout_p", "dropout_seed"))
        call = WholeCall(
            shape_of(tuple(batch), heads, kv_heads, n, m, case.options["is_causal"]), case.mask,
            case.options["scale"], None if p is None else Dropout(p, of),
        )  # fmt: skip

        def cuts(count: int, step: int = 1, case: Case = case) -> list[Interval]:
            edges = {0, count * step, case.draw.randint(0, count) * step}
            return [Interval(*pair) for pair in itertools.pairwise(sorted(edges))]

        entries = torch.Size(batch).numel()
        ones = [Interval(i, i + 1) for i in range(entries)]
        # A sink is one more key, of the keys of one block.
        whole = isinstance(case.mask, Mask) and case.mask.sinks is not None
        of_keys = [Interval(0, m)] if whole or p else cuts(m)
        of_rows = [Interval(0, n)] if p else cuts(n)  # dropout counts positions from 0
        of_heads = cuts(kv_heads, heads // kv_heads)
        wide = torch.promote_types(case.dtype, torch.float32)
        out, lse = torch.zeros(grad_out.shape), torch.zeros(grad_out.shape[:-1])
        found = [out, lse, *(torch.zeros(t.shape) for t in (query, key, value))]
        found = [t.to(wide) for t in found]
        for rest in itertools.product(
            cuts(entries) if len(batch) == 1 else ones, of_heads, of_rows
        ):
            blocks = [CallBlock(*rest, keys) for keys in of_keys]
            parts = []
            for block in blocks:
                three = {"query": call.cut(query, block, of_keys=False)}
                three |= {
                    name: call.cut(t, block, of_keys=True)
                    for name, t in (("key", key), ("value", value))
                }
                parts.append((three, *compute_block(call, block, three, ON_CPU)))
            states = torch.stack([part[2] for part in parts])
            total = states.logsumexp(0)
            weights = (states - total).nan_to_num(nan=-torch.inf).exp()[..., None]
            merged = (torch.stack([part[1] for part in parts]) * weights).sum(0)
            call.cut(found[0], blocks[0], of_keys=False).copy_(merged)
            call.cut(found[1], blocks[0], of_keys=False).copy_(total)
            for block, (three, *_) in zip(blocks, parts, strict=True):
                given = three | {
                    "grad_out": call.cut(grad_out, block, of_keys=False),
                    "out": merged.to(case.dtype), "lse": total,
                }  # fmt: skip
                for grad, part, keys in zip(
                    found[2:], compute_block(call, block, given, ON_CPU), (False, True, True),
                    strict=True,
                ):  # fmt: skip
                    call.cut(grad, block, of_keys=keys).add_(part)
        results = dict(zip(NAMES, found, strict=True))
        case.check(
            {n: t if n == "lse" else t.to(case.dtype) for n, t in results.items()}
        )


N, M = 70, 90


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16]
)
@pytest.mark.parametrize("spread", [1.0, 30.0])
def test_only_rows_of_the_same_call_are_the_same(
    dtype: torch.dtype, spread: float
) -> None:
    """A log-sum-exp that comes from elsewhere is told from that of another call."""

    def check(
        call: WholeCall, read: Any, budget: int | None = None, blocks: int = 1
    ) -> None:
        options = CallOptions(budget, devices=torch.device("cpu"))
        check_forward(
            call,
            CallBlock(*(Interval(0, n) for n in (2, 4, N, M))),
            read,
            options,
            blocks,
        )

    given = inputs(N, M, batch=(2,), heads=4, kv_heads=2, dtype=dtype, spread=spread)
    kept = torch.rand(4, N, M) > 0.5
    for mask, causal in itertools.product((None, Mask(bias=kept)), (True, False)):
        named: dict[str, Any] = {
            "is_causal": causal,
            "enable_gqa": True,
            "kernel": "cpu",
        }
        out, lse = qa.attention_with_lse(*given.three, mask, **named)
        read = dict(zip(("query", "key", "value"), given.three, strict=True))
        read |= {"out": out, "lse": lse}
        call = WholeCall(shape_of((2,), 4, 2, N, M, causal), mask)
        for budget in (None, 300_000):
            check(call, read, budget)
    for changed, tensors in (
        (call, {"lse": lse + 0.1}),
        (replace(call, scale=2 * 8**-0.5), {}),
        (replace(call, shape=replace(call.shape, is_causal=True)), {}),
        (replace(call, mask=Mask(bias=~kept)), {}),
        (call, {"query": read["query"].flip(-1)}),
    ):
        for blocks in (1, 9) if spread == 1 else ():
            with pytest.raises(ValueError, match="another forward"):
                check(changed, {**read, **tensors}, blocks=blocks)
