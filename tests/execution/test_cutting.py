"""Tasks at the depth of a plan and deeper, and schedules with slots for them."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.cutting import Cutting
from quorum_attention.kernels import DenseKernel


@pytest.mark.parametrize("levels", [(), (7,), (3, 7)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_one_level_deeper_and_back(levels: tuple[int, ...], is_causal: bool) -> None:
    """The way back is to what was planned: its limits of rectangles as well."""
    plan = qa.plan(
        600, heads=2, head_dim=4, dtype=torch.float32, is_causal=is_causal, levels=levels, tile=8,
        kernel="dense", sweep=False, device="cpu",
    )  # fmt: skip
    cutting = Cutting(plan.schedule, plan.work, DenseKernel(), backward=False)
    depth = len(levels)
    at_first = cutting.tasks(depth), cutting.schedule(depth)
    assert [task.path for task in at_first[0]] == list(plan.decomposition.paths())
    deeper = cutting.schedule(depth + 1)
    assert deeper.decomposition.levels == (*levels, 7)
    assert len(cutting.tasks(depth + 1)) == 7 * len(at_first[0])
    assert (cutting.tasks(depth), cutting.schedule(depth)) == at_first
    assert at_first[1] == plan.schedule


def test_cut_further_in_order() -> None:
    plan = qa.plan(600, heads=2, head_dim=4, dtype=torch.float32, levels=(7,), tile=8,
                   kernel="dense", device="cpu")  # fmt: skip
    cutting = Cutting(plan.schedule, plan.work, DenseKernel(), backward=False)
    left = cutting.tasks(1)[3:5]
    paths = [task.path for task in cutting.further(left, 2)]
    assert paths == [(i, j) for i in (3, 4) for j in range(7)]
