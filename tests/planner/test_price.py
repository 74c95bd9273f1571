"""Predicted seconds: what a machine does faster, or less often, takes no longer. Device bytes:
sums that add up, and that what runs stays within."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

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
from quorum_attention.execution.schedule import schedule_of
from quorum_attention.kernels import DenseKernel
from quorum_attention.planner.hardware import assumed
from quorum_attention.planner.price import cost, footprint_of, least_seconds

WORK = Workload((2,), 8, 2, 1 << 16, 1 << 16, 64, 64, torch.float16, True)
PLACE = Placement("cuda", False, False, torch.float16)
MACHINE = assumed("cuda", torch.float16)


@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("levels", [(7,), (31,), (7, 3)])
@pytest.mark.parametrize("sizes", [(9000, 1 << 16), (1 << 16, 9000), (100, 1 << 16), (50, 60)])
def test_the_arithmetic_is_never_left_out(sizes, levels, spec) -> None:
    """Where there are few queries or few keys most tasks have none: those that are priced do."""
    for causal in (False,) if sizes[0] > sizes[1] else (False, True):
        work = replace(WORK, n_queries=sizes[0], n_keys=sizes[1], is_causal=causal)
        problem = Problem(work, DenseKernel(), spec, PLACE)
        shape = Decomposition(work.n_tokens, levels)
        made = schedule_of(work, shape, GroupSize(1, 2), Slots(2, "host"))
        assert cost(made, problem, MACHINE).arithmetic >= least_seconds(problem, MACHINE)


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

    def total(route=None, levels=levels, group=None, place=place) -> int:
        shape = Decomposition(WORK.n_tokens, levels)
        made = schedule_of(WORK, shape, group or GroupSize(1, 2), route or Slots(n_cap, "device"))
        return footprint_of(made, Problem(WORK, DenseKernel(), spec, place)).total

    usual = total()
    assert total(Slots(n_cap + 1, "device")) > usual
    assert total(Slots(n_cap, "host")) <= usual
    assert total(levels=(*levels, 7)) < usual
    assert total(group=GroupSize(1, 1)) < usual
    assert total(place=replace(place, results_given=True)) <= usual
