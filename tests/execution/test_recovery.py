"""The runner obeys the machine: evict, fewer slots, deeper, or give up and say why."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import helpers.plans
import pytest
import torch
from helpers.attention import assert_close, exact, inputs
from helpers.fake_device import FakeDevice
from helpers.kernels import Counted, WatchedKernel
from helpers.passes import pass_of

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N = 300
SIZES = {
    "heads": 2,
    "head_dim": 8,
    "dtype": torch.float32,
    "layout": "aligned",
    "tile": 16,
}


def unpinned(kernel: WatchedKernel, n_cap: int, *, backward: bool = False) -> qa.Plan:
    """A plan of one level that is not pinned: its budget is too small for a whole
    call."""
    whole = qa.plan(
        N, kernel=kernel, levels=(), backward=backward, n_cap=n_cap, **SIZES
    )
    one = qa.plan(
        N, kernel=kernel, levels=(7,), backward=backward, n_cap=n_cap, **SIZES
    )
    assert one.peak_bytes < whole.peak_bytes
    return qa.plan(
        N, kernel=kernel, budget=one.peak_bytes, backward=backward, n_cap=n_cap, **SIZES
    )


def run(kernel: WatchedKernel, plan: qa.Plan):  # type: ignore[no-untyped-def]
    given = inputs(N)
    report = qa.Report()
    kernel.arm()
    out = qa.attention(*given.three, plan=plan, kernel=kernel, report=report)
    assert_close(out, exact(given).out, 2e-5)
    assert report.total.recoveries == len(report.forward.recoveries)
    return report.forward


def test_fewer_slots_first_then_one_level_deeper() -> None:
    kernel = WatchedKernel({0, 3, 5})
    plan = unpinned(kernel, 3)
    depth = plan.depth
    done = run(kernel, plan)
    assert [line.split(": ", 1)[1] for line in done.recoveries] == [
        "slots 3 -> 2",
        "slots 2 -> 1",
        f"depth {depth} -> {depth + 1}",
    ]
    assert done.levels == (*plan.levels, 7)
    assert done.planned_levels == plan.levels
    assert done.n_cap == 1


def test_giving_up_tells_where_and_the_history() -> None:
    """At once where the depth is pinned."""
    pinned, hopeless = WatchedKernel({3}), WatchedKernel(set(range(10_000)))
    plan = qa.plan(N, kernel=pinned, levels=(7,), **SIZES)
    pinned.arm()
    with pytest.raises(
        qa.OutOfMemoryError, match=r"task \(3,\).*pinned.*sabotaged call 3"
    ):
        qa.attention(*inputs(N).three, plan=plan, kernel=pinned)
    plan = unpinned(hopeless, 2)
    hopeless.arm()
    with pytest.raises(
        qa.OutOfMemoryError, match=r"finest(.|\n)*slots 2 -> 1(.|\n)*depth"
    ):
        qa.attention(*inputs(N).three, plan=plan, kernel=hopeless)
    assert not hopeless.completed


def test_room_that_opens_again_is_used_at_the_next_head_group() -> None:
    """Once memory is free again after a recovery, later groups have the planned
    depth."""
    kernel = WatchedKernel({1})
    plan = qa.plan(
        N, kernel=kernel, n_cap=1, heads_per_group=1, **SIZES,
        budget=qa.plan(N, kernel=kernel, levels=(7,), n_cap=1, heads_per_group=1,
                       **SIZES).peak_bytes,
    )  # fmt: skip
    done = run(kernel, plan)
    assert done.recoveries[-1].startswith("headroom")
    assert done.levels == plan.levels
    assert any(len(path) == plan.depth + 1 for path in kernel.completed)
    assert kernel.completed[-1] == list(plan.tasks())[-1].path


ROUTES: dict[str, dict[str, Any]] = {
    "whole": {"levels": ()},
    "over inputs": {"levels": (7,), "over_inputs": True},
    "streaming": {"levels": (7,), "over_inputs": False, "layout": "balanced"},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_costs_the_group_it_met(route: str, backward: bool) -> None:
    """Any call may fail: head groups that are done stay done."""
    kernel, call, heads, n = Counted(), {"is_causal": True}, 8, 80
    given = inputs(n, heads=heads)
    plan = qa.plan(
        n, kernel=kernel, device="cpu", backward=backward, heads=heads, head_dim=8, tile=16,
        dtype=torch.float32, heads_per_group=1, **ROUTES[route], **call,
    )  # fmt: skip
    plan = helpers.plans.unpinned(plan)
    if route == "streaming":
        plan = helpers.plans.passing(plan, 27, 20, kernel=kernel)
    report, wanted = qa.Report(), exact(given, is_causal=True, gradients=True)
    run = pass_of(given, backward, **call)

    def computed(*fails: int) -> None:
        kernel.arm(set(fails))
        with FakeDevice() if route == "streaming" else nullcontext():
            assert_close(
                run(kernel=kernel, plan=plan, report=report), wanted.of(backward), 5e-5
            )

    computed()  # it is tried out
    computed()
    calls, pairs = kernel.n_calls, kernel.pairs
    assert pairs == heads * n * (n + 1) // 2
    for number in range(calls // 16, calls, 1 + calls // 9):
        # Rows that pass by go through slots next, where a task may fail as well.
        again = [number + 9] if route == "streaming" else []
        computed(number, *again)
        assert kernel.n_calls > calls or again
        assert kernel.pairs <= pairs + (1 + 1.5 * len(again)) * pairs / heads
        done = report.backward if backward else report.forward
        assert done.recoveries
        assert not again or "through slots" in done.recoveries[0]
