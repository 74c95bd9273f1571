"""The runner obeys the machine: evict, fewer slots, deeper, or give up and say why."""

from __future__ import annotations

from typing import Any

import helpers_plans
import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_kernels import Counted, WatchedKernel

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N = 300
SIZES = {"heads": 2, "head_dim": 8, "dtype": torch.float32, "layout": "aligned", "tile": 16}


def unpinned(kernel: WatchedKernel, n_cap: int, *, backward: bool = False) -> qa.Plan:
    """A plan of one level that is not pinned: its budget is too small for a whole call."""
    whole = qa.plan(N, kernel=kernel, levels=(), backward=backward, n_cap=n_cap, **SIZES)
    one = qa.plan(N, kernel=kernel, levels=(7,), backward=backward, n_cap=n_cap, **SIZES)
    assert one.peak_bytes < whole.peak_bytes
    return qa.plan(N, kernel=kernel, budget=one.peak_bytes, backward=backward, n_cap=n_cap, **SIZES)


def run(kernel: WatchedKernel, plan: qa.Plan):  # type: ignore[no-untyped-def]
    given = inputs(N)
    report = qa.Report()
    kernel.arm()
    out = qa.attention(*given.three, plan=plan, kernel=kernel, report=report)
    assert_close(out, exact(given).out, 2e-5)
    assert report.forward is not None
    assert report.total.recoveries == len(report.forward.recoveries)
    return report.forward


def test_fewer_slots_first_then_one_level_deeper() -> None:
    kernel = WatchedKernel({0, 3, 5})
    plan = unpinned(kernel, 3)
    depth = plan.depth
    done = run(kernel, plan)
    assert [line.split(": ", 1)[1] for line in done.recoveries] == [
        "n_cap 3 -> 2",
        "n_cap 2 -> 1",
        f"depth {depth} -> {depth + 1}",
    ]
    assert done.levels == (*plan.levels, 7)
    assert done.planned_levels == plan.levels
    assert done.n_cap == 1


def test_the_offending_task_runs_again_and_the_finished_do_not() -> None:
    kernel = WatchedKernel({4})
    plan = unpinned(kernel, 2)
    run(kernel, plan)
    paths = [task.path for task in plan.tasks()] * plan.n_groups
    assert kernel.completed == paths
    assert kernel.started == [*paths[:5], *paths[4:]]


def test_a_pinned_depth_reports_the_failure_and_its_place() -> None:
    kernel = WatchedKernel({3})
    given = inputs(N)
    plan = qa.plan(N, kernel=kernel, levels=(7,), **SIZES)
    kernel.arm()
    with pytest.raises(qa.OutOfMemoryError, match=r"task \(3,\).*pinned.*sabotaged call 3"):
        qa.attention(*given.three, plan=plan, kernel=kernel)


def test_giving_up_tells_the_history() -> None:
    kernel = WatchedKernel(set(range(10_000)))
    plan = unpinned(kernel, 2)
    kernel.arm()
    with pytest.raises(qa.OutOfMemoryError, match=r"finest(.|\n)*n_cap 2 -> 1(.|\n)*depth"):
        qa.attention(*inputs(N).three, plan=plan, kernel=kernel)
    assert not kernel.completed


def test_room_that_opens_again_is_used_at_the_next_head_group() -> None:
    """Once memory is free again after a recovery, later groups have the planned depth."""
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


@pytest.mark.parametrize("route", [{"levels": ()}, {"levels": (7,), "over_inputs": True}], ids=str)
@pytest.mark.parametrize("backward", [False, True])
def test_a_failure_costs_the_group_it_met(route: dict[str, Any], backward: bool) -> None:
    """One in the sixth of eight groups repeats work of that group only."""
    kernel, call = Counted(), {"is_causal": True}
    made = inputs(80, heads=8, batch=(1,))
    sizes = {"heads": 8, "head_dim": 8, "dtype": torch.float32, "heads_per_group": 1, "tile": 16}
    plan = qa.plan(80, kernel=kernel, device="cpu", backward=backward, **sizes, **route, **call)
    saved = qa.attention_with_lse(*made.three, **call)
    call |= {"kernel": kernel, "plan": helpers_plans.unpinned(plan)}

    def run() -> tuple[torch.Tensor, ...]:
        if backward:
            return qa.attention_backward(made.grad_out, *made.three, *saved, **call)
        return qa.attention_with_lse(*made.three, **call)

    usual = run()  # the kernel is tried out
    kernel.arm(set())
    usual = run()
    calls, pairs = kernel.n_calls, kernel.pairs
    assert pairs == 8 * 80 * 81 // 2
    kernel.arm({calls * 5 // 8 + calls // 16})
    recovered = run()
    assert kernel.n_calls > calls
    assert kernel.pairs <= pairs + pairs // 8
    for one, other in zip(recovered, usual, strict=True):
        assert_close(one, other.double(), 5e-5)
