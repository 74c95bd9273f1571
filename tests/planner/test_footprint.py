"""Device bytes of a schedule: sums that add up, and that what runs stays within."""

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
from quorum_attention.execution.case import Case, Placement
from quorum_attention.execution.device.backend import ROUNDING_BYTES
from quorum_attention.execution.pass_spec import BACKWARD, FORWARD
from quorum_attention.execution.routes.in_place import Together
from quorum_attention.execution.routes.slots import Slots
from quorum_attention.execution.routes.whole import Whole
from quorum_attention.execution.schedule import schedule_of
from quorum_attention.execution.workload import GroupSize, Workload
from quorum_attention.kernels import get_kernel
from quorum_attention.planner.footprint import Footprint, footprint_of

WORK = Workload((2,), 4, 2, 20_000, 20_000, 64, 64, torch.float16, True)
PLACE = Placement("cuda", False, False, torch.float16)
ROUTES = {
    "whole": (Whole(), ()),
    "together": (Together(), (7,)),
    "slots": (Slots(2, "device"), (7,)),
    "one slot, host": (Slots(1, "host"), (7, 7)),
}


def footprint(route, levels, spec, *, work=WORK, place=PLACE, group=None) -> Footprint:  # type: ignore[no-untyped-def]
    made = schedule_of(work, Decomposition(work.n_tokens, levels), group or GroupSize(1, 2), route)
    return footprint_of(made, Case(work, get_kernel("dense"), spec, place))


@pytest.mark.parametrize("name", list(ROUTES))
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=["forward", "backward"])
@pytest.mark.parametrize("resident", [True, False])
def test_the_total_is_all_of_it(name: str, spec, resident: bool) -> None:  # type: ignore[no-untyped-def]
    route, levels = ROUTES[name]
    if not (resident or isinstance(route, Slots)):
        pytest.skip("runs on what is there")
    found = footprint(route, levels, spec, place=replace(PLACE, resident=resident))
    parts = (found.slots, found.workspace, found.accumulators, found.results, found.rounding)
    assert found.total == sum(parts)
    assert min(parts) >= 0
    assert (found.slots > 0) == isinstance(route, Slots)
    assert found.rounding >= ROUNDING_BYTES  # of the workspace at least
    if not resident:
        assert found.results == 0, "results are where the inputs are"


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


@pytest.mark.parametrize("home", ["device", "host"])
def test_on_a_cpu_both_homes_count(home) -> None:  # type: ignore[no-untyped-def]
    found = footprint(Slots(1, home), (7,), FORWARD, place=replace(PLACE, device_type="cpu"))
    assert found.accumulators > 0
    far = footprint(Slots(1, "host"), (7,), FORWARD)
    assert far.accumulators == 0


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
