"""Which kernel "auto" means, where a budget is so tight that the preferred one is held up."""

from __future__ import annotations

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.workload import Workload
from quorum_attention.kernels import get_kernel
from quorum_attention.planner.calibration import machine_of
from quorum_attention.planner.footprint import Placement
from quorum_attention.planner.rivals import quickest
from quorum_attention.planner.search import Request

N = 1 << 20


def planned(budget: str, **call) -> qa.Plan:
    # For a CUDA device that need not be here.
    return qa.plan(N, budget=budget, is_causal=True, device="cuda", inputs="host", **call)


def test_the_preferred_kernel_where_there_is_room() -> None:
    for backward in (False, True):
        assert planned("1GiB", backward=backward).kernel == "cudnn"


def test_another_where_it_is_clearly_faster() -> None:
    tight = planned("128MiB", backward=True)
    named = planned("128MiB", backward=True, kernel="cudnn")
    assert tight.kernel == "native"
    assert tight.predicted_seconds < 0.9 * named.predicted_seconds
    assert named.kernel == "cudnn"


@pytest.mark.parametrize("call", [{"dtype": torch.float32}, {"head_dim": 96}])
def test_only_where_rates_are_known(call) -> None:
    kernel = planned("256MiB", **call).kernel
    assert kernel != "native"


def test_a_budget_that_only_another_fits() -> None:
    with pytest.raises(qa.BudgetError) as alone:
        planned("8MiB", backward=True, kernel="cudnn")
    with pytest.raises(qa.BudgetError) as both:
        planned("8MiB", backward=True)
    least = both.value.smallest_bytes
    assert least is not None
    assert least < alone.value.smallest_bytes
    found = planned(str(least), backward=True)
    assert found.kernel == "native"
    assert found.peak_bytes <= least


def test_a_kernel_is_believed_before_it_is_taken() -> None:
    work = Workload((1,), 8, 8, N, N, 64, 64, torch.float16, True)
    asked = []

    def choose(answer: bool) -> str:
        def believed(kernel) -> bool:
            asked.append(kernel.name)
            return answer

        return quickest(
            work, Request(128 << 20), get_kernel("cudnn"), [get_kernel("native")],
            Placement("cuda", False, False, torch.float16),
            machine_of(torch.device("cuda"), torch.float16, 64), backward=True, believed=believed,
        ).name  # fmt: skip

    assert choose(True) == "native"
    assert choose(False) == "cudnn"
    assert asked == ["native", "native"]


def test_a_plan_is_run_on_its_own_kernel() -> None:
    """Its peak was reckoned for that one."""
    x = torch.randn(1, 2, 300, 16)
    plan = qa.plan(300, heads=2, head_dim=16, dtype=torch.float32, device="cpu", kernel="dense")
    report = qa.Report()
    qa.attention(x, x, x, plan=plan, devices="cpu", report=report)
    assert plan.kernel == "dense"
    assert report.forward is not None
    assert report.forward.kernel == "dense"
