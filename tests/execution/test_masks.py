"""A rectangle's mask is what dense indexing gives, for every way a mask can broadcast."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import inputs
from helpers_memory import usage

import quorum_attention as qa
from quorum_attention.kernels.tensors import BASE_TWO_LOWEST, dead_rows

BATCH, HEADS, QUERIES, KEYS = (2, 3), 4, 40, 55


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_made_without_a_mask_counts_the_call_s(backward: bool) -> None:
    """The call's mask adds a rectangle of the mask to each task; a budget has to hold for that."""
    n = 1600
    made = inputs(n, heads=1, head_dim=8)
    mask = torch.randn(n, n).mT  # not as kernels take it: gathered for every rectangle
    sizes = {"heads": 1, "head_dim": 8, "dtype": torch.float32, "levels": (7,), "device": "cpu",
             "tile": 16, "kernel": "dense", "backward": backward}  # fmt: skip
    plan, report = qa.plan(n, **sizes), qa.Report()
    out, lse = qa.attention_with_lse(*made.three, mask, kernel="dense", depth=1)

    def run(**more: object) -> object:
        if backward:
            return qa.attention_backward(
                made.grad_out, *made.three, out, lse, mask, plan=plan, **more
            )
        return qa.attention(*made.three, mask, plan=plan, **more)

    peak = usage(lambda: run(report=report)).peak
    planned = (report.backward if backward else report.forward).planned_peak_bytes
    assert plan.peak_bytes < planned
    assert peak <= planned
    with pytest.raises(qa.BudgetError):
        run(budget=planned - 1)
    run(budget=planned)


@pytest.mark.parametrize("causal", [False, True])
def test_rows_of_the_lowest_number_are_without_keys_where_kernels_cannot_tell(causal: bool) -> None:
    lowest = torch.finfo(torch.float32).min
    bias = torch.tensor([[0.0, lowest, 0.0], [lowest, lowest, lowest], [lowest, -math.inf, 1.0]])
    bias = bias[None, None]
    assert dead_rows(bias, 3, causal).tolist() == [[[False] * 3]]
    gone = dead_rows(bias, 3, causal, BASE_TWO_LOWEST)
    assert gone.tolist() == [[[False, True, False]]]
