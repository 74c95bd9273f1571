"""The schedule that is chosen: as wished, within the budget, and none looked at beats it."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from quorum_attention.decomposition import Decomposition
from quorum_attention.errors import BudgetError
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.pass_spec import spec_of
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.trimming import pairs_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels import get_kernel
from quorum_attention.planner import policy
from quorum_attention.planner.machine import assumed
from quorum_attention.planner.search import (
    Candidate,
    Wish,
    _deep_levels,
    _level_choices,
    _paced,
    _schedules,
    choose,
    price,
    refitted,
    short_monolithic,
)

GIB = 1 << 30
MACHINE = assumed("cuda", torch.float16)
FAR = Placement("cuda", False, False, torch.float16)
NEAR = replace(FAR, resident=True)
KERNEL = get_kernel("cudnn")


def work(n: int = 1 << 18, heads: int = 4, **more) -> Workload:  # type: ignore[no-untyped-def]
    return replace(Workload((1,), heads, heads, n, n, 64, 64, torch.float16, True), **more)


def chosen(
    call: Workload, wish: Wish, place: Placement = FAR, *, backward: bool = False
) -> Candidate:
    return choose(call, wish, KERNEL, place, MACHINE, backward=backward)


@settings(max_examples=15, deadline=None)
@given(
    n=st.integers(1 << 14, 1 << 20),
    heads=st.sampled_from([1, 2, 8]),
    budget=st.integers(64 << 20, 8 * GIB),
    resident=st.booleans(),
    backward=st.booleans(),
)
def test_nothing_that_fits_is_predicted_faster(n, heads, budget, resident, backward) -> None:  # type: ignore[no-untyped-def]
    call, wish, place = work(n, heads), Wish(budget), NEAR if resident else FAR
    try:
        best = chosen(call, wish, place, backward=backward)
    except BudgetError:
        return
    assert best.footprint.total <= budget
    pairs = pairs_of(call, KERNEL)
    machine = _paced(MACHINE, call, KERNEL, pairs, backward=backward)
    case = Case(call, KERNEL, spec_of(backward), place)
    again = price(best.schedule, case, machine)
    assert (again.footprint, again.cost) == (best.footprint, best.cost)
    if best.cost.seconds < policy.WORTH_COMPARING:
        return
    every = _schedules(case, wish, pairs)
    for schedule in list(every)[::7]:
        other = price(schedule, case, machine)
        if other.footprint.total <= budget:
            slack = policy.CLEARLY if isinstance(best.schedule.route, Whole) else 1.0
            slack -= policy.FIRST_CALL_COUNTS
            assert other.cost.seconds >= slack * best.cost.seconds


@pytest.mark.parametrize("backward", [False, True])
def test_more_room_is_never_slower(backward: bool) -> None:
    call, seconds = work(1 << 20), []
    for budget in (GIB // 8, GIB // 4, GIB, 4 * GIB, 64 * GIB):
        seconds.append(chosen(call, Wish(budget), backward=backward).cost.seconds)
    # A plan of fewer shapes to prepare may be taken for one of them.
    pairs = pairwise(seconds)
    assert all(after <= before * (1 + policy.FIRST_CALL_COUNTS) for before, after in pairs)


WISHES = {
    "levels": Wish(GIB, levels=(13, 7)),
    "depth": Wish(GIB, depth=2),
    "a great depth": Wish(GIB, depth=4),
    "tile and layout": Wish(GIB, levels=(7,), layout="balanced", tile=64),
    "accumulator": Wish(GIB, accumulator="host"),
    "group": Wish(GIB, group=GroupSize(1, 1)),
    "one slot": Wish(GIB, n_cap=1, depth=1),
    "streams": Wish(GIB, streams=2, depth=1),
    "pinned": Wish(GIB, pinned=True),
    "slots": Wish(4 * GIB, over_inputs=False, depth=1),
}


@pytest.mark.parametrize("name", list(WISHES))
@pytest.mark.parametrize("place", [FAR, NEAR], ids=["far", "near"])
def test_wishes_are_kept(name: str, place: Placement) -> None:
    wish = WISHES[name]
    schedule = chosen(work(), wish, place).schedule
    shape = schedule.decomposition
    if wish.levels is not None:
        assert shape.levels == wish.levels
        assert (shape.layout, shape.tile) == (wish.layout, wish.tile)
    if wish.depth is not None:
        assert shape.depth == wish.depth
    if wish.group is not None:
        assert schedule.group == wish.group
    if wish.over_inputs is False:
        assert isinstance(schedule.route, Slots)
    for field in ("n_cap", "accumulator", "streams"):
        wanted = getattr(wish, field)
        assert wanted is None or getattr(schedule, field) == wanted, field
    assert schedule.pinned == wish.pinned


def test_a_budget_in_which_nothing_fits_is_named_with_one_in_which_something_does() -> None:
    call = work()
    with pytest.raises(BudgetError) as refused:
        chosen(call, Wish(1000))
    smallest = refused.value.smallest_bytes
    assert smallest is not None
    assert chosen(call, Wish(smallest)).footprint.total <= smallest
    # Asked not to hold to it, it says what comes closest.
    assert chosen(call, Wish(1000, enforce_budget=False)).footprint.total > 1000
    with pytest.raises(BudgetError, match=r"at levels \(7,\)"):
        chosen(call, Wish(1000, levels=(7,)))


def test_remembered() -> None:
    call = work()
    assert chosen(call, Wish(GIB)) is chosen(work(), Wish(GIB))
    assert chosen(call, Wish(GIB)) is not chosen(call, Wish(2 * GIB))


def test_short_calls_are_not_searched_for() -> None:
    short = work(2048)
    found = chosen(short, Wish(GIB), NEAR)
    assert isinstance(found.schedule.route, Whole)
    assert "nothing else was looked at" in found.why
    once = short_monolithic(short, KERNEL, NEAR, MACHINE, backward=False)
    assert once is not None
    assert once.footprint == found.footprint
    assert short_monolithic(work(1 << 20), KERNEL, NEAR, MACHINE, backward=False) is None
    assert short_monolithic(short, KERNEL, FAR, MACHINE, backward=False) is None
    several = replace(short, batch_shape=(2, 2))
    assert short_monolithic(several, KERNEL, NEAR, MACHINE, backward=False) is None


@pytest.mark.parametrize("backward", [False, True])
def test_a_plan_for_inputs_here_serves_inputs_elsewhere(backward: bool) -> None:
    """Through slots, at its levels; and what it was made for it serves as it is."""
    call = work(1 << 17)
    for wish in (Wish(64 * GIB), Wish(64 * GIB, depth=1)):
        found = chosen(call, wish, NEAR, backward=backward)
        case = Case(call, KERNEL, spec_of(backward), NEAR)
        same = refitted(found, case, NEAR, MACHINE)
        assert same == found
        case = replace(case, place=FAR)
        moved = refitted(found, case, NEAR, MACHINE)
        assert moved.schedule.decomposition == found.schedule.decomposition
        assert moved.schedule.runs(case)
        assert isinstance(moved.schedule.route, Slots)


def test_level_choices_are_quorums_coarser_first() -> None:
    for masked in (False, True):
        levels = _level_choices(masked)
        assert levels[0] == ()
        assert len(set(levels)) == len(levels)
        for chosen_levels in levels:
            Decomposition(10_000, chosen_levels)  # raises where there is no such quorum
            assert list(chosen_levels) == sorted(chosen_levels, reverse=True)


@pytest.mark.parametrize("n", [1, 300, 5000])
@pytest.mark.parametrize("layout", ["aligned", "balanced"])
def test_deep_levels_all_make_tasks_smaller(n: int, layout: str) -> None:
    for levels in _deep_levels(n, layout, 128):
        shape = Decomposition(n, levels, layout, 128)  # type: ignore[arg-type]
        assert shape.n_tasks <= policy.MOST_TASKS
        if len(levels) > 1:
            coarser = replace(shape, levels=levels[:-1])
            assert shape.max_task_tokens < coarser.max_task_tokens
