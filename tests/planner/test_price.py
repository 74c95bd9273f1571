"""Predicted seconds: what a machine does faster, or less often, takes no longer. Device bytes:
sums that add up, and that what runs stays within."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers_attention import inputs
from helpers_memory import usage
from hypothesis import given, settings
from hypothesis import strategies as st

import quorum_attention as qa
from quorum_attention.decomposition import Decomposition
from quorum_attention.execution.problem import (
    BACKWARD,
    FORWARD,
    GroupSize,
    Placement,
    Problem,
    Workload,
)
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.schedule import Schedule, schedule_of
from quorum_attention.kernels import DenseKernel, get_kernel
from quorum_attention.planner.hardware import assumed
from quorum_attention.planner.price import Cost, Footprint, cost, footprint_of, least_seconds

WORK = Workload((2,), 8, 2, 1 << 16, 1 << 16, 64, 64, torch.float16, True)
PLACE = Placement("cuda", False, False, torch.float16)
MACHINE = assumed("cuda", torch.float16)
SPECS = pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=["forward", "backward"])


def schedule(levels=(7,), route=None, group=None, work=WORK) -> Schedule:  # type: ignore[no-untyped-def]
    shape = Decomposition(work.n_tokens, levels)
    return schedule_of(work, shape, group or GroupSize(1, 2), route or Slots(2, "host"))


def of(made: Schedule, spec, *, work=WORK, place=PLACE, machine=MACHINE, launch=None) -> Cost:  # type: ignore[no-untyped-def]
    kernel = DenseKernel()
    if launch is not None:
        kernel.whole_tasks, kernel.launch_seconds = True, launch
    return cost(made, Problem(work, kernel, spec, place), machine)


@SPECS
@pytest.mark.parametrize("levels", [(7,), (31,), (7, 3)])
@pytest.mark.parametrize("sizes", [(9000, 1 << 16), (1 << 16, 9000), (100, 1 << 16), (50, 60)])
def test_the_arithmetic_is_never_left_out(sizes, levels, spec) -> None:  # type: ignore[no-untyped-def]
    """Where there are few queries or few keys most tasks have none: those that are priced do."""
    causals = (False,) if sizes[0] > sizes[1] else (False, True)
    for causal in causals:
        work = replace(WORK, n_queries=sizes[0], n_keys=sizes[1], is_causal=causal)
        made = schedule(levels, work=work)
        assert of(made, spec, work=work).arithmetic >= least_seconds(
            Problem(work, DenseKernel(), spec, PLACE), MACHINE
        )


# --- Bytes --------------------------------------------------------------------------------------

WORK_2 = Workload((2,), 4, 2, 20_000, 20_000, 64, 64, torch.float16, True)


def footprint(route, levels, spec, *, work=WORK_2, place=PLACE, group=None) -> Footprint:  # type: ignore[no-untyped-def]
    made = schedule_of(work, Decomposition(work.n_tokens, levels), group or GroupSize(1, 2), route)
    return footprint_of(made, Problem(work, get_kernel("dense"), spec, place))


@settings(max_examples=60, deadline=None)
@given(
    levels=st.sampled_from([(7,), (13,), (7, 7), (31, 7)]),
    n_cap=st.integers(1, 3),
    backward=st.booleans(),
    resident=st.booleans(),
    given_results=st.booleans(),
)
def test_less_takes_no_more(levels, n_cap, backward, resident, given_results) -> None:  # type: ignore[no-untyped-def]
    spec = BACKWARD if backward else FORWARD
    place = replace(PLACE, resident=resident, results_given=given_results)

    def total(route=None, levels=levels, group=None, place=place) -> int:  # type: ignore[no-untyped-def]
        made = route or Slots(n_cap, "device")
        return footprint(made, levels, spec, place=place, group=group).total

    usual = total()
    assert total(Slots(n_cap + 1, "device")) > usual
    assert total(Slots(n_cap, "host")) <= usual
    assert total(levels=(*levels, 7)) < usual
    assert total(group=GroupSize(1, 1)) < usual
    assert total(place=replace(place, results_given=True)) <= usual


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize(
    ("levels", "over_inputs"), [((), None), ((7,), True), ((7,), False), ((3, 7), None)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_runs_stays_within(backward: bool, levels, over_inputs, dtype: torch.dtype) -> None:  # type: ignore[no-untyped-def]
    n = 3000
    given_ = inputs(n, heads=2, head_dim=32, dtype=dtype)
    plan = qa.plan(n, heads=2, head_dim=32, dtype=dtype, is_causal=True, levels=levels, tile=16,
                   device="cpu", kernel="cpu", over_inputs=over_inputs,
                   backward=backward)  # fmt: skip
    call = {"is_causal": True, "kernel": "cpu", "plan": plan}
    out, lse = qa.attention_with_lse(*given_.three, is_causal=True, kernel="cpu")

    def run() -> object:
        if backward:
            return qa.attention_backward(given_.grad_out, *given_.three, out, lse, **call)
        return qa.attention_with_lse(*given_.three, **call)

    run()
    found = usage(run)
    assert found.peak <= plan.peak_bytes
    assert found.left <= 0
