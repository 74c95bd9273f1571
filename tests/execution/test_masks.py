"""A rectangle's mask is what dense indexing gives, for every way a mask can broadcast."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from helpers_attention import fresh_generator, inputs
from helpers_memory import usage

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition, Rectangle
from quorum_attention.execution.call import MaskView
from quorum_attention.execution.problem import GroupSize, Workload, groups
from quorum_attention.kernels.tensors import BASE_TWO_LOWEST, dead_rows

BATCH, HEADS, QUERIES, KEYS = (2, 3), 4, 40, 55
SPANS = list(product([False, True], repeat=5))


def make(spans: tuple[bool, ...], kind: torch.dtype) -> torch.Tensor:
    whole = (*BATCH, HEADS, QUERIES, KEYS)
    shape = tuple(n if s else 1 for n, s in zip(whole, spans, strict=True))
    values = torch.randn(shape, generator=fresh_generator())
    return values > 0 if kind == torch.bool else values.to(kind)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16])
@pytest.mark.parametrize("spans", SPANS, ids=["".join("01"[s] for s in each) for each in SPANS])
def test_bias_of_every_rectangle_equals_dense_indexing(
    spans: tuple[bool, ...], kind: torch.dtype
) -> None:
    mask = make(spans, kind)
    whole = mask.expand(*BATCH, HEADS, QUERIES, KEYS)
    if kind == torch.bool:
        dense = torch.zeros(whole.shape).masked_fill(~whole, -torch.inf)
    else:
        dense = whole.float()
    work = Workload(BATCH, HEADS, 2, QUERIES, KEYS, 8, 8, torch.float32, False)
    tasks = list(Decomposition(55, (7,), "balanced").tasks())[::3]
    for group in [*groups(work, GroupSize(1, 1)), *groups(work, GroupSize(3, 2))]:
        for task in tasks:
            tokens = torch.tensor([t for a, b, _ in task.runs for t in range(a, b)])
            bias = MaskView(mask, len(BATCH)).bias(group, task, torch.float32, torch.device("cpu"))
            for r in task.rectangles(False, QUERIES, KEYS)[:3]:
                part = bias(r)
                rows = tokens[r.query_start : r.query_stop]
                columns = tokens[r.key_start : r.key_stop]
                expected = torch.stack(
                    [dense[e][group.query_heads][:, rows][:, :, columns] for e in group.entries]
                )
                assert part is not None
                assert part.dtype == torch.float32
                assert torch.equal(part.expand(expected.shape), expected)


@pytest.mark.parametrize("kind", [torch.bool, torch.float32, torch.float16])
def test_gathering_takes_no_more_memory_than_its_result(kind: torch.dtype) -> None:
    """The columns of a rectangle are selected before its rows are gathered."""
    n = 700
    mask = torch.randn(1, 4, n, n, generator=fresh_generator())
    mask = mask > 0 if kind == torch.bool else mask.to(kind)
    work = Workload((1,), 4, 4, n, n, 8, 8, torch.float16, False)
    task = Decomposition(n, (7,), "balanced").task((2,))
    assert len(task.runs) > 1
    group = next(groups(work, GroupSize(1, 4)))
    bias = MaskView(mask, 1).bias(group, task, torch.float16, torch.device("cpu"))
    rectangle = Rectangle(0, task.n_tokens, 0, task.n_tokens // 2)
    result = 4 * rectangle.n_queries * rectangle.n_keys * 2
    assert usage(lambda: bias(rectangle)).peak <= result + 4096


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
