"""Which kernel "auto" means, where a budget is so tight that the preferred one is held up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.problem import Placement, Problem, Workload, spec_of
from quorum_attention.kernels import get_kernel
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.decide import choose_plan
from quorum_attention.planner.search import PlanConstraints

N = 1 << 20


def planned(budget: str, **call) -> qa.Plan:
    # For a CUDA device that need not be here.
    return qa.plan(N, budget=budget, is_causal=True, device="cuda", inputs="host", **call)


def cut(budget: str, **call) -> qa.Plan:
    """Tasks of one level: where no rows pass by, the preferred kernel is held up by many calls."""
    return planned(budget, depth=1, **call)


def test_another_where_it_is_clearly_faster() -> None:
    tight = cut("128MiB", backward=True)
    named = cut("128MiB", backward=True, kernel="cudnn")
    assert tight.kernel == "native"
    assert tight.predicted_seconds < 0.9 * named.predicted_seconds
    assert named.kernel == "cudnn"


def test_a_budget_that_only_another_fits() -> None:
    with pytest.raises(qa.BudgetError) as alone:
        planned("1MiB", backward=True, kernel="cudnn")
    with pytest.raises(qa.BudgetError) as both:
        planned("1MiB", backward=True)
    least = both.value.smallest_bytes
    assert least is not None
    assert least < alone.value.smallest_bytes
    found = planned(str(least), backward=True)
    assert found.kernel == "native"
    assert found.peak_bytes <= least


def chosen(constraints: PlanConstraints, kernel_works: Any) -> str:
    work = Workload((1,), 8, 8, N, N, 64, 64, torch.float16, True)
    place = Placement("cuda", False, False, torch.float16)
    case = Problem(work, get_kernel("cudnn"), spec_of(True), place)
    hardware = hardware_of(torch.device("cuda"), torch.float16, 64)
    others = [get_kernel("native")]
    return choose_plan(case, constraints, others, hardware, kernel_works=kernel_works)[0].name


def test_the_number_that_is_named_is_of_a_kernel_that_works() -> None:
    smallest = []
    for answer in (True, False):
        with pytest.raises(qa.BudgetError) as raised:
            chosen(PlanConstraints(1 << 20), lambda kernel, answer=answer: answer)
        smallest.append(raised.value.smallest_bytes)
    assert smallest[0] < smallest[1]
