"""``plan()`` and ``estimate()``: within a budget, honest about what is needed, and quick."""

from __future__ import annotations

import logging
import time
from itertools import pairwise

import pytest
import torch
from helpers_attention import inputs
from helpers_memory import usage
from helpers_passes import pass_of, smallest_budget

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.planner.plan import _log_once

CALL = {"heads": 4, "head_dim": 16, "dtype": torch.float32, "device": "cpu"}


@pytest.mark.parametrize(
    ("n", "layout", "useful"), [(300, "aligned", 0), (4096, "aligned", 4), (500, "balanced", 7)]
)
def test_a_depth_at_which_nothing_gets_smaller_is_refused(n, layout, useful) -> None:
    """Each level is seven times the tasks: on, and nothing gets smaller, it never ends."""
    shapes = [Decomposition(n, (7,) * depth, layout) for depth in range(useful + 2)]
    sizes = [shape.max_task_tokens for shape in shapes]
    assert all(after < before for before, after in pairwise(sizes[:-1]))
    assert sizes[-1] == sizes[-2]
    call = {"layout": layout, **CALL}
    for depth in (max(3, useful) + 1, 10, 40):
        with pytest.raises(ValueError, match=f"at most {max(3, useful)} .*more levels make"):
            qa.plan(n, depth=depth, **call)
    assert qa.plan(n, depth=useful, **call).depth == useful


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_plan_for_a_billion_tokens_is_symbolic(device: str) -> None:
    """No array over tokens anywhere: that would take minutes, and more memory than there is."""
    began = time.perf_counter()
    plan = qa.plan(10**9, heads=8, head_dim=64, device=device, is_causal=True,
                   budget="64GiB" if device == "cuda" else "4TiB",
                   levels=None if device == "cuda" else (57,))  # fmt: skip
    task = plan.task(tuple(0 for _ in plan.levels))
    rectangles = task.rectangles(True)
    assert time.perf_counter() - began < 30
    assert task.n_tokens <= plan.decomposition.max_task_tokens
    assert rectangles


def test_a_budget_of_a_plan_holds_for_wider_results() -> None:
    call = {"head_dim": 64, "dtype": torch.float16, "device": "cpu", "levels": (3,)}
    peak = qa.plan(4000, heads=1, **call).peak_bytes
    plan = qa.plan(4000, heads=1, budget=peak, **call)
    three = [torch.zeros(1, 1, 4000, 64, dtype=torch.float16) for _ in range(3)]
    qa.attention(*three, plan=plan)
    with pytest.raises(qa.BudgetError, match="the plan's budget"):
        qa.attention(*three, plan=plan, out_dtype=torch.float64)


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_made_without_a_mask_counts_the_call_s(backward: bool) -> None:
    """The call's mask adds a rectangle of the mask to each task; a budget has to hold for that."""
    n = 1600
    made = inputs(n, heads=1, head_dim=8)
    mask = torch.randn(n, n).mT  # not as kernels take it: gathered for every rectangle
    sizes = {"heads": 1, "head_dim": 8, "dtype": torch.float32, "levels": (7,), "device": "cpu",
             "tile": 16, "kernel": "dense", "backward": backward}  # fmt: skip
    plan, report = qa.plan(n, **sizes), qa.Report()
    run = pass_of(made, backward, attn_mask=mask, plan=plan, report=report)
    peak = usage(run).peak
    planned = (report.backward if backward else report.forward).planned_peak_bytes
    assert plan.peak_bytes < planned
    assert peak <= planned
    assert smallest_budget(lambda most: run(budget=most)) == planned


@pytest.mark.usefixtures("one_thread")
def test_once_for_calls_of_a_kind(caplog: pytest.LogCaptureFixture) -> None:
    q = torch.randn(1, 4, 400, 16, requires_grad=True)
    _log_once.cache_clear()
    with caplog.at_level(logging.INFO, "quorum_attention"):
        qa.attention(q, q, q)
        assert not caplog.records, "not cut"
        for _ in range(3):
            qa.attention(q, q, q, depth=1).sum().backward()
        lines = [record.getMessage() for record in caplog.records]
        assert [line.split()[0] for line in lines] == ["forward", "backward"]
        for words in ("400 queries x 400 keys", "1 x 4 heads", "budget none", "depth 1",
                      "kernel cpu", "predicted"):  # fmt: skip
            assert words in lines[0]
        qa.attention(q.detach(), q.detach(), q.detach(), budget="64MiB", depth=1)
    assert "budget 64.00 MiB" in caplog.records[2].getMessage()
    assert {record.name for record in caplog.records} == {"quorum_attention"}


# --- estimate(): a dry run of both passes ---


def test_what_fits_and_what_does_not() -> None:
    roomy = qa.estimate(20_000, budget="2GiB", **CALL)
    assert roomy.fits_monolithic
    assert roomy.forward.depth == 0
    least = smallest_budget(lambda most: qa.plan(20_000, budget=most, backward=True, **CALL))
    tight = qa.estimate(20_000, budget=least, **CALL)
    assert tight.forward.peak_bytes <= tight.budget_bytes
    assert tight.backward.peak_bytes <= tight.budget_bytes
    assert tight.backward.backward
    assert not tight.forward.backward
