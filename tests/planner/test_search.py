"""The schedule that is chosen: as wished, within the budget, and none looked at beats it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.errors import BudgetError
from quorum_attention.execution.problem import GroupSize, Placement, Problem, Workload, spec_of
from quorum_attention.execution.routes.over_inputs import Whole
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.kernels import get_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.hardware import assumed
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import kernel_hardware, price
from quorum_attention.planner.search import PlanConstraints, _schedules, choose, refitted

GIB = 1 << 30
MACHINE = assumed("cuda", torch.float16)
FAR = Placement("cuda", False, False, torch.float16)
NEAR = replace(FAR, resident=True)
KERNEL = get_kernel("cudnn")


def work(n: int = 1 << 18, heads: int = 4, **more) -> Workload:  # type: ignore[no-untyped-def]
    return replace(Workload((1,), heads, heads, n, n, 64, 64, torch.float16, True), **more)


def chosen(
    call: Workload, constraints: PlanConstraints, place: Placement = FAR, *, backward: bool = False
) -> Plan:
    case = Problem(call, KERNEL, spec_of(backward), place)
    return choose(case, constraints, MACHINE)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1 << 14, 1 << 20),
    heads=st.sampled_from([1, 2, 8]),
    budget=st.integers(64 << 20, 8 * GIB),
    resident=st.booleans(),
    backward=st.booleans(),
)
def test_nothing_that_fits_is_predicted_faster(n, heads, budget, resident, backward) -> None:  # type: ignore[no-untyped-def]
    call, constraints, place = work(n, heads), PlanConstraints(budget), NEAR if resident else FAR
    try:
        best = chosen(call, constraints, place, backward=backward)
    except BudgetError:
        return
    assert best.footprint.total <= budget
    case = Problem(call, KERNEL, spec_of(backward), place)
    machine = kernel_hardware(case, MACHINE)
    again = price(best.schedule, case, machine)
    assert (again.footprint, again.cost) == (best.footprint, best.cost)
    if best.cost.seconds < policy.WORTH_COMPARING:
        return
    every = _schedules(case, constraints)
    for schedule in list(every)[::7]:
        other = price(schedule, case, machine)
        if other.footprint.total <= budget:
            slack = policy.CLEARLY if isinstance(best.schedule.route, Whole) else 1.0
            slack -= policy.FIRST_CALL_COUNTS
            assert other.cost.seconds >= slack * best.cost.seconds


CONSTRAINTS = {
    "levels": PlanConstraints(GIB, levels=(13, 7)),
    "depth": PlanConstraints(GIB, depth=2),
    "a great depth": PlanConstraints(GIB, depth=4),
    "tile and layout": PlanConstraints(GIB, levels=(7,), layout="balanced", tile=64),
    "accumulator": PlanConstraints(GIB, accumulator="host"),
    "group": PlanConstraints(GIB, group=GroupSize(1, 1)),
    "one slot": PlanConstraints(GIB, n_cap=1, depth=1),
    "streams": PlanConstraints(GIB, streams=2, depth=1),
    "pinned": PlanConstraints(GIB, pinned=True),
    "slots": PlanConstraints(4 * GIB, over_inputs=False, depth=1),
}


@pytest.mark.parametrize("name", list(CONSTRAINTS))
@pytest.mark.parametrize("place", [FAR, NEAR], ids=["far", "near"])
def test_wishes_are_kept(name: str, place: Placement) -> None:
    constraints = CONSTRAINTS[name]
    schedule = chosen(work(), constraints, place).schedule
    shape = schedule.decomposition
    if constraints.levels is not None:
        assert shape.levels == constraints.levels
        assert (shape.layout, shape.tile) == (constraints.layout, constraints.tile)
    if constraints.depth is not None:
        assert shape.depth == constraints.depth
    if constraints.group is not None:
        assert schedule.group == constraints.group
    if constraints.over_inputs is False:
        assert isinstance(schedule.route, Slots)
    for field in ("n_cap", "accumulator", "streams"):
        wanted = getattr(constraints, field)
        assert wanted is None or getattr(schedule, field) == wanted, field
    assert schedule.pinned == constraints.pinned


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_for_inputs_here_serves_inputs_elsewhere(backward: bool) -> None:
    """Through slots, at its levels; and what it was made for it serves as it is."""
    call = work(1 << 17)
    for constraints in (PlanConstraints(64 * GIB), PlanConstraints(64 * GIB, depth=1)):
        found = chosen(call, constraints, NEAR, backward=backward)
        case = Problem(call, KERNEL, spec_of(backward), NEAR)
        same = refitted(found, case, MACHINE)
        assert same == found
        case = replace(case, place=FAR)
        moved = refitted(found, case, MACHINE)
        assert moved.schedule.decomposition == found.schedule.decomposition
        assert moved.schedule.runs(case)
        assert isinstance(moved.schedule.route, Slots)
