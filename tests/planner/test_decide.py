"""Which kernel and route are chosen where a budget is tight: another kernel where that is faster or
alone fits; rows that pass by where that is faster than tasks, and only where they can."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import quorum_attention as qa
from quorum_attention.execution.problem import Placement, Problem, Workload, spec_of
from quorum_attention.execution.routes.slots import Slots, Streaming
from quorum_attention.kernels import get_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.calibration import hardware_of
from quorum_attention.planner.decide import choose_plan
from quorum_attention.planner.search import PlanConstraints

N = 1 << 20


def planned(budget: str | int, *, backward: bool = True, **more: Any) -> qa.Plan:
    # For a CUDA device that need not be here.
    call = {"is_causal": True, "device": "cuda", "inputs": "host", **more}
    return qa.plan(N, budget=budget, backward=backward, **call)


def test_another_kernel_where_it_is_clearly_faster() -> None:
    """Tasks of one level: where no rows pass by, the preferred kernel is held up by many calls."""
    tight = planned("128MiB", depth=1)
    named = planned("128MiB", depth=1, kernel="cudnn")
    assert (tight.kernel, named.kernel) == ("native", "cudnn")
    assert tight.predicted_seconds < 0.9 * named.predicted_seconds


def test_a_budget_that_only_another_fits() -> None:
    with pytest.raises(qa.BudgetError) as alone:
        planned("1MiB", kernel="cudnn")
    with pytest.raises(qa.BudgetError) as both:
        planned("1MiB")
    least = both.value.smallest_bytes
    assert least is not None
    assert least < alone.value.smallest_bytes
    found = planned(str(least))
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


@pytest.mark.parametrize("backward", [False, True])
def test_a_tight_budget_lets_rows_pass_by(backward: bool) -> None:
    found = planned("64MiB", backward=backward)
    tasks = planned("64MiB", backward=backward, depth=1, kernel="cudnn")
    assert isinstance(found.schedule.route, Streaming)
    assert found.kernel == "cudnn"
    assert found.peak_bytes <= 64 << 20
    assert found.predicted_seconds < policy.PASSING * tasks.predicted_seconds
    # Whole waves of an H200, so that none of its multiprocessors waits for others.
    route = found.schedule.route
    assert route.rows(route.stays) * found.schedule.group.kv_heads % (132 * 128) == 0
    assert route.rows(route.stays) % route.rows(route.streams_by) == 0
    assert route.words in found.describe()
    # What takes over if memory runs out fits the budget as well.
    instead = found.schedule.through_slots(found.work)
    assert isinstance(instead.route, Slots)
    assert f"{found.schedule.route.passage(found.work).n_units:,} time" in found.describe()


@pytest.mark.parametrize(
    "asked",
    [
        {"depth": 1}, {"levels": (553,)}, {"n_cap": 1}, {"accumulator": "host"}, {"streams": 1},
        {"heads_per_group": 1}, {"kernel": "native"}, {"dropout_p": 0.1}, {"over_inputs": False},
        {"attn_mask": qa.Mask(window=4096)}, {"inputs": "device", "budget": "20GiB"},
    ],
    ids=str,
)  # fmt: skip
def test_not_where_tasks_were_asked_for_or_rows_cannot_pass_by(asked: dict[str, Any]) -> None:
    budget = asked.get("budget", "512MiB" if "levels" in asked else "128MiB")
    rest = {name: value for name, value in asked.items() if name != "budget"}
    assert not isinstance(planned(budget, **rest).schedule.route, Streaming)
