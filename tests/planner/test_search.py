"""The schedule that is chosen: as wished, within the budget, and none looked at beats
it."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice
from typing import Any

import pytest
import torch
from helpers.plans import assumed, shape_of
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.head_groups import GroupSize
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.problem import Placement, Problem
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import schedule_of
from quorum_attention.kernels import CallShape, get_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.candidates import decompositions, schedules
from quorum_attention.planner.constraints import PlanConstraints
from quorum_attention.planner.plan import Plan
from quorum_attention.planner.price import (
    cost,
    kernel_hardware,
    least_cost,
    least_seconds,
    price,
)
from quorum_attention.planner.search import choose, refit

GIB = 1 << 30
MACHINE = assumed("cuda", torch.float16)
FAR = Placement(False, False, torch.float16)
NEAR = replace(FAR, resident=True)
KERNEL = get_kernel("cudnn")


def work(n: int = 1 << 18, heads: int = 4, **more) -> CallShape:  # type: ignore[no-untyped-def]
    return shape_of((1,), heads, heads, n, n, True, **more)


def chosen(
    shape: CallShape,
    constraints: PlanConstraints,
    place: Placement = FAR,
    *,
    backward: bool = False,
) -> Plan:
    case = Problem(shape, KERNEL, spec_of(backward), place)
    return choose(case, constraints, MACHINE)


@pytest.mark.slow
@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1 << 14, 1 << 20),
    heads=st.sampled_from([1, 2, 8]),
    budget=st.integers(64 << 20, 8 * GIB),
    resident=st.booleans(),
    backward=st.booleans(),
)
def test_nothing_that_fits_is_predicted_faster(
    n, heads, budget, resident, backward
) -> None:  # type: ignore[no-untyped-def]
    call, constraints, place = (
        work(n, heads),
        PlanConstraints(budget),
        NEAR if resident else FAR,
    )
    try:
        best = chosen(call, constraints, place, backward=backward)
    except BudgetError:
        return
    assert best.footprint.total <= budget
    case = Problem(call, KERNEL, spec_of(backward), place)
    machine = kernel_hardware(case, MACHINE)
    again = price(best.schedule, case, machine)
    assert (again.footprint, again.cost) == (best.footprint, best.cost)
    if best.cost.seconds < policy.MIN_SECONDS_TO_SEARCH:
        return
    cuts = islice(decompositions(n, constraints), 40)
    every = [one for cut in cuts for one in schedules(case, constraints, cut)]
    for schedule in every[::7]:
        other = price(schedule, case, machine)
        if other.footprint.total <= budget:
            slack = (
                policy.REQUIRED_TIME_SHARE
                if isinstance(best.schedule.route, Whole)
                else 1.0
            )
            slack -= policy.MAX_PREPARATION_SHARE
            assert other.cost.seconds >= slack * best.cost.seconds


CONSTRAINTS: list[dict[str, Any]] = [
    {"levels": (13, 7)}, {"depth": 2}, {"depth": 4},
    {"levels": (7,), "layout": "balanced", "tile": 64}, {"accumulator": "host"},
    {"group": GroupSize(1, 1)}, {"n_cap": 1, "depth": 1}, {"streams": 2, "depth": 1},
    {"pinned": True}, {"budget_bytes": 4 * GIB, "over_inputs": False, "depth": 1},
]  # fmt: skip


@pytest.mark.slow_but_first
@pytest.mark.parametrize("asked", CONSTRAINTS, ids=str)
@pytest.mark.parametrize("place", [FAR, NEAR], ids=["far", "near"])
def test_wishes_are_kept(asked: dict[str, Any], place: Placement) -> None:
    schedule = chosen(
        work(), PlanConstraints(**{"budget_bytes": GIB, **asked}), place
    ).schedule
    for name, wanted in asked.items():
        if name == "over_inputs":
            assert isinstance(schedule.route, Slots)
        elif name != "budget_bytes":
            owners = schedule, schedule.route, schedule.decomposition
            owner = next(one for one in owners if hasattr(one, name))
            assert getattr(owner, name) == wanted
    assert schedule.pinned == asked.get("pinned", False)


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_for_inputs_here_serves_inputs_elsewhere(backward: bool) -> None:
    """Through slots, at its levels; and what it was made for it serves as it is."""
    call = work(1 << 17)
    for constraints in (PlanConstraints(64 * GIB), PlanConstraints(64 * GIB, depth=1)):
        found = chosen(call, constraints, NEAR, backward=backward)
        case = Problem(call, KERNEL, spec_of(backward), NEAR)
        same = refit(found, case, MACHINE)
        assert same == found
        case = replace(case, place=FAR)
        moved = refit(found, case, MACHINE)
        assert moved.schedule.decomposition == found.schedule.decomposition
        assert moved.schedule.runs(case)
        assert isinstance(moved.schedule.route, Slots)


# --- Predicted seconds and bytes -----------------------------------------------------------------

DENSE = get_kernel("dense")
WORK = shape_of((2,), 8, 2, 1 << 16, 1 << 16, True)


@pytest.mark.parametrize(
    "spec", map(spec_of, (False, True)), ids=["forward", "backward"]
)
@pytest.mark.parametrize("levels", [(7,), (31,), (7, 3)])
@pytest.mark.parametrize(
    "sizes", [(9000, 1 << 16), (1 << 16, 9000), (100, 1 << 16), (50, 60)]
)
def test_the_arithmetic_is_never_left_out(sizes, levels, spec) -> None:
    """Where there are few queries or few keys most tasks have none: those that are
    priced do."""
    for causal in (False,) if sizes[0] > sizes[1] else (False, True):
        work = replace(WORK, n_queries=sizes[0], n_keys=sizes[1], is_causal=causal)
        decomposition = Decomposition(work.n_tokens, levels)
        made = schedule_of(work, decomposition, GroupSize(1, 2), Slots(2, "host"))
        for problem in (Problem(work, DENSE, spec, place) for place in (FAR, NEAR)):
            found = cost(made, problem, MACHINE)
            assert found.arithmetic >= least_seconds(problem, MACHINE)
            assert found.seconds >= least_cost(made, problem, MACHINE)


@settings(max_examples=60, deadline=None)
@given(
    levels=st.sampled_from([(7,), (13,), (7, 7), (31, 7)]),
    n_cap=st.integers(1, 3),
    backward=st.booleans(),
    resident=st.booleans(),
    given_results=st.booleans(),
)
def test_less_takes_no_more(levels, n_cap, backward, resident, given_results) -> None:  # type: ignore[no-untyped-def]
    place = replace(FAR, resident=resident, results_given=given_results)

    def total(route=None, levels=levels, group=None, place=place) -> int:
        decomposition = Decomposition(WORK.n_tokens, levels)
        made = schedule_of(
            WORK,
            decomposition,
            group or GroupSize(1, 2),
            route or Slots(n_cap, "device"),
        )
        problem = Problem(WORK, DENSE, spec_of(backward), place)
        return made.route.memory_use(made, problem).total

    usual = total()
    assert total(Slots(n_cap + 1, "device")) > usual
    assert total(Slots(n_cap, "host")) <= usual
    assert total(levels=(*levels, 7)) < usual
    assert total(group=GroupSize(1, 1)) < usual
    assert total(place=replace(place, results_given=True)) <= usual
