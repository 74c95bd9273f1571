"""What kernels say they allocate, against what they allocate."""

from __future__ import annotations

import pytest
import torch
from kernel_harness import Case, _task_tensors
from torch.profiler import ProfilerActivity, profile

from quorum_attention.decomposition import Decomposition
from quorum_attention.kernels import Extent, Gradients, Statistics, empty_, get_kernel


def peak_bytes(work) -> int:
    """Most bytes allocated at once on the CPU during ``work()``."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as recorded:
        work()
    events = [e for e in recorded.profiler.kineto_results.events() if e.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    live = peak = 0
    for event in events:
        live += event.nbytes()
        peak = max(peak, live)
    return peak


CASES = {
    "plain": Case(2500, heads=2, head_dim=64, levels=()),
    "causal": Case(2000, heads=2, head_dim=64, causal=True, levels=(7,), tile=128),
    "one head": Case(2500, heads=1, head_dim=128, levels=()),
    "grouped": Case(1500, heads=8, key_heads=2, head_dim=64, levels=()),
    "wide value": Case(1500, heads=2, head_dim=32, value_dim=96, levels=()),
    "wide head": Case(1500, heads=2, head_dim=96, value_dim=32, levels=()),
    "masked": Case(700, heads=2, mask=torch.ones(1, 2, 700, 700, dtype=torch.bool).tril()),
    "bf16": Case(2500, heads=2, head_dim=64, dtype=torch.bfloat16, levels=()),
    "fp64": Case(1500, heads=2, head_dim=64, dtype=torch.float64, levels=()),
    "small": Case(9, heads=1, levels=()),
}


@pytest.mark.parametrize("kernel_name", ["cpu", "dense"])
@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_bounds_hold_and_are_close(kernel_name: str, case: Case) -> None:
    kernel = get_kernel(kernel_name)
    work = torch.float64 if case.dtype == torch.float64 else torch.float32
    n = case.n_queries
    task = next(iter(Decomposition(n, case.levels, case.layout, case.tile).tasks()))
    local, rows, _ = _task_tensors(
        case, task, case.query, case.key, case.value, case.additive_mask(case.dtype)
    )
    nq = rows.numel()
    queries = max(r.query_stop - r.query_start for r in local.rectangles)
    keys = max(r.key_stop - r.key_start for r in local.rectangles)
    extent = Extent(case.batch, case.heads, case.key_heads, nq, queries, keys)
    state = Statistics(
        torch.empty(case.batch, case.heads, nq, case.value_dim, dtype=work),
        torch.empty(case.batch, case.heads, nq, dtype=work),
    )
    empty_(state.out, state.lse)
    grads = Gradients(
        case.grad_out[:, :, rows],
        torch.zeros_like(case.grad_out[:, :, rows]),
        state.lse,
        *(torch.zeros(t.shape, dtype=work) for t in (local.query, local.key, local.value)),
    )
    call = case.call("cpu")
    # The first call may set things up for good.
    kernel.forward(local, state)
    kernel.backward(local, grads)
    bounds = {
        "forward": kernel.forward_workspace_bytes(call, extent),
        "backward": kernel.backward_workspace_bytes(call, extent),
    }
    used = {
        "forward": peak_bytes(lambda: kernel.forward(local, state)),
        "backward": peak_bytes(lambda: kernel.backward(local, grads)),
    }
    # The reference's boolean mask comes from NumPy, whose allocations are not recorded.
    unseen = 4 * nq * nq + 3 * 2**20 if kernel_name == "dense" else 0
    # Tiles of every thread, whether a small case gives it work or not.
    unseen += 3 * 2**20 * max(0, torch.get_num_threads() - 2)
    for direction, bound in bounds.items():
        assert used[direction] <= bound, (direction, used, bounds)
        # A constant of a few MiB apart, no more than half as much again.
        assert bound <= 1.5 * used[direction] + unseen + 8 * 2**20, (direction, used, bounds)
