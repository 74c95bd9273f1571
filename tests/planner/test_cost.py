"""Predicted seconds: what a machine does faster, or less often, takes no longer."""

from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.pass_spec import BACKWARD, FORWARD
from quorum_attention.execution.routes.in_place import Together
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import Schedule, schedule_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels import DenseKernel
from quorum_attention.planner.cost import Cost, _all_shapes, cost, least_seconds
from quorum_attention.planner.machine import Machine, assumed

WORK = Workload((2,), 8, 2, 1 << 16, 1 << 16, 64, 64, torch.float16, True)
PLACE = Placement("cuda", False, False, torch.float16)
MACHINE = assumed("cuda", torch.float16)
TERMS = ("arithmetic", "merge", "up", "down", "issue", "exposed", "fixed", "preparation")
SPECS = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=["forward", "backward"])


def schedule(levels=(7,), route=None, group=None, work=WORK) -> Schedule:  # type: ignore[no-untyped-def]
    shape = Decomposition(work.n_tokens, levels)
    return schedule_of(work, shape, group or GroupSize(1, 2), route or Slots(2, "host"))


def of(made: Schedule, spec, *, work=WORK, place=PLACE, machine=MACHINE, launch=None) -> Cost:  # type: ignore[no-untyped-def]
    kernel = DenseKernel()
    if launch is not None:
        kernel.whole_tasks, kernel.launch_seconds = True, launch
    return cost(made, Case(work, kernel, spec, place), machine)


ROUTES = {
    "slots": (Slots(2, "host"), (7,)),
    "one slot": (Slots(1, "device"), (7, 7)),
    "together": (Together(), (7,)),
    "whole": (Whole(), ()),
}


@SPECS
@pytest.mark.parametrize("route", list(ROUTES))
def test_terms_are_seconds(route: str, spec) -> None:  # type: ignore[no-untyped-def]
    made, levels = ROUTES[route]
    place = replace(PLACE, resident=True)
    found = of(schedule(levels, made), spec, place=place)
    assert all(getattr(found, term) >= 0 for term in TERMS)
    assert found.arithmetic > 0
    assert 0 < found.seconds <= sum(getattr(found, term) for term in TERMS) * 2
    # Nothing is copied or merged where the kernel runs on the inputs as they lie.
    if route == "whole":
        assert found.merge == found.up == found.down == 0
    if route == "together":
        assert found.up == found.down == 0 < found.merge


@SPECS
@pytest.mark.parametrize("route", list(ROUTES))
@pytest.mark.parametrize(
    "rate",
    ["flops", "backward_flops", "merge_bytes_per_second", "up_bytes_per_second",
     "down_bytes_per_second", "call_seconds", "copy_seconds", "unit_seconds", "pass_seconds"],
)  # fmt: skip
def test_a_faster_machine_is_no_slower(rate: str, route: str, spec) -> None:  # type: ignore[no-untyped-def]
    made, levels = ROUTES[route]
    better = 0.5 if rate.endswith("_seconds") else 2.0
    faster = replace(MACHINE, **{rate: better * getattr(MACHINE, rate)})
    before, after = (of(schedule(levels, made), spec, machine=m) for m in (MACHINE, faster))
    assert after.seconds <= before.seconds
    for term in TERMS:
        assert getattr(after, term) <= getattr(before, term), term


@settings(max_examples=40, deadline=None)
@given(
    parts=st.tuples(*(st.floats(0, 10),) * 4),
    exposed=st.floats(0, 1),
    even=st.booleans(),
    overlaps=st.booleans(),
)
def test_the_whole_lies_between_the_slowest_part_and_the_sum(
    parts, exposed, even, overlaps
) -> None:  # type: ignore[no-untyped-def]
    arithmetic, up, down, issue = parts
    found = Cost(arithmetic, 0.0, up, down, issue, exposed, 0.5, 9.0, even, overlaps)
    longest, total = max(parts), sum(parts)
    assert longest + 0.5 <= found.seconds <= total + exposed + 0.5 + 1e-9
    if not overlaps:
        assert found.seconds == pytest.approx(total + 0.5)
    elif even:
        assert found.seconds == pytest.approx(longest + exposed + 0.5)


def test_all_heads_cost_as_much_as_each_of_them() -> None:
    """Arithmetic is that of all pairs, however heads are grouped and tokens are cut."""
    plain = replace(MACHINE, wave_rows=0, filling_rows=0.0, filling_causal=0.0, cache_bytes=0,
                    call_device_seconds=0.0, throttle=0.0)  # fmt: skip
    wanted = 4.0 * 64 * WORK.pairs * WORK.batch * WORK.heads / plain.flops
    for levels, route in (((), Whole()), ((7,), Slots()), ((13, 7), Slots()), ((13,), Together())):
        for group in (GroupSize(1, 1), GroupSize(1, 2)):
            found = of(schedule(levels, route, group), FORWARD, machine=plain)
            assert found.arithmetic == pytest.approx(wanted)
            backward = of(schedule(levels, route, group), BACKWARD, machine=plain)
            expected = 2.5 * wanted * plain.flops / plain.backward_flops
            assert backward.arithmetic == pytest.approx(expected)


@SPECS
def test_what_is_resident_does_not_cross_the_bus(spec) -> None:  # type: ignore[no-untyped-def]
    near = of(schedule(), spec, place=replace(PLACE, resident=True))
    far = of(schedule(), spec)
    assert near.up < far.up / 10
    assert near.down < far.down / 10


@SPECS
def test_bytes_up_are_those_of_every_visit(spec) -> None:  # type: ignore[no-untyped-def]
    """A row is in l tasks of a level; states on the device stay there, those on the host do not."""
    device, host = (of(schedule(route=Slots(2, home)), spec) for home in ("device", "host"))
    inputs = sum(i.count(WORK) * i.dtype(WORK).itemsize for i in spec.inputs)
    assert device.up == pytest.approx(3 * inputs / MACHINE.up_bytes_per_second)
    assert host.up > device.up
    assert host.down == pytest.approx(3 * device.down)


def test_a_kernel_of_whole_tasks_issues_one_launch_each() -> None:
    made = schedule((7, 7))
    launch = of(made, FORWARD, launch=(1e-3, 2e-3))
    calls = of(made, FORWARD)
    assert launch.preparation == 0.0 < calls.preparation
    assert launch.merge == 0.0 < calls.merge
    twice = of(made, FORWARD, launch=(2e-3, 2e-3))
    units = 49 * 2  # two batch entries
    assert twice.issue - launch.issue == pytest.approx(units * 1e-3)


def test_one_slot_hides_nothing_two_do() -> None:
    one, two = (of(schedule(route=Slots(n, "host")), FORWARD) for n in (1, 2))
    assert one.exposed == pytest.approx(one.up + one.down)
    assert two.exposed < one.exposed / 10
    assert isinstance(MACHINE, Machine)
    assert asdict(one).keys() >= set(TERMS)


@SPECS
@pytest.mark.parametrize("levels", [(7,), (31,), (7, 3)])
@pytest.mark.parametrize("sizes", [(9000, 1 << 16), (1 << 16, 9000), (100, 1 << 16), (50, 60)])
def test_the_arithmetic_is_never_left_out(sizes, levels, spec) -> None:  # type: ignore[no-untyped-def]
    """Where there are few queries or few keys most tasks have none: those that are priced do."""
    causals = (False,) if sizes[0] > sizes[1] else (False, True)
    for causal in causals:
        work = replace(WORK, n_queries=sizes[0], n_keys=sizes[1], is_causal=causal)
        made = schedule(levels, work=work)
        assert of(made, spec, work=work).arithmetic >= least_seconds(work, MACHINE, spec)


@pytest.mark.parametrize(
    ("tokens", "mib", "sizes", "shapes"), [(1 << 15, 16, 40, 40), (1 << 20, 1 << 10, 8, 9)]
)
def test_all_shapes_of_a_plan_are_counted(tokens: int, mib: int, sizes: int, shapes: int) -> None:
    """A backward of 32,768 tokens in 16 MiB prepared shapes for 3 seconds, of which 0.2 were
    predicted: from a few tasks of a sequence that is cut twice."""
    plan = qa.plan(
        tokens, heads=8, head_dim=64, dtype=torch.float16, budget=mib << 20, is_causal=True,
        backward=True, device="cuda", kernel="cudnn",
    )  # fmt: skip
    rectangles = [r for task in plan.decomposition.tasks() for r in task.rectangles(True)]
    assert len({(r.n_queries, r.n_keys, r.causal) for r in rectangles}) == sizes
    # Two of a size in one call are a shape of their own.
    assert plan.candidate.cost.preparation == pytest.approx(shapes * MACHINE.plan_seconds)


def test_of_very_many_tasks_some_are_counted_wherever_they_repeat() -> None:
    cut = Decomposition(1 << 16, (57, 31), tile=1)
    few = _all_shapes(cut, True, 1 << 16, 1 << 16, None)
    every = {(r.n_queries, r.n_keys, r.causal) for t in cut.tasks() for r in t.rectangles(True)}
    assert 0.5 * len(every) <= few <= len(every)
