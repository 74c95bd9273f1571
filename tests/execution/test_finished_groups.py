"""Head groups that are finished stay finished, on every route: no pair is computed twice."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_attention import assert_close, inputs
from helpers_kernels import Counted
from helpers_plans import unpinned

import quorum_attention as qa

pytestmark = pytest.mark.usefixtures("one_thread")
N, HEADS = 96, 8


ROUTES = {
    "direct": {"levels": ()},
    "over_inputs": {"levels": (7,), "over_inputs": True, "tile": 8},
    "slots": {"levels": (7,), "over_inputs": False, "tile": 8, "n_cap": 2},
}


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("batch", [(), (2, 2)])
def test_a_failure_costs_the_group_it_met(route, backward, is_causal, dtype, batch) -> None:
    """A failure in the sixth of eight groups repeats work of that group only."""
    kernel, every = Counted(), math.prod(batch)
    made = inputs(N, batch=batch, heads=HEADS, head_dim=8, dtype=dtype)
    plan = unpinned(
        qa.plan(N, heads=HEADS, head_dim=8, dtype=dtype, is_causal=is_causal, batch=every,
                heads_per_group=1, kernel=kernel, device="cpu", backward=backward, **ROUTES[route])
    )  # fmt: skip
    pin = {"is_causal": is_causal, "kernel": kernel}
    out, lse = qa.attention_with_lse(*made.three, is_causal=is_causal)
    # The kernel is tried out at its first forward and its first backward: not counted below.
    qa.attention(*made.three, **pin)
    qa.attention_backward(made.grad_out, *made.three, out, lse, **pin)
    report = qa.Report()

    def call() -> tuple[torch.Tensor, ...]:
        more = {**pin, "plan": plan, "report": report}
        if backward:
            return qa.attention_backward(made.grad_out, *made.three, out, lse, **more)
        return qa.attention_with_lse(*made.three, **more)

    kernel.arm(set())
    usual = call()
    calls, pairs = kernel.n_calls, kernel.pairs
    groups = HEADS * every
    assert pairs == groups * (N * (N + 1) // 2 if is_causal else N * N)
    kernel.arm({calls * 5 // 8 + calls // groups // 2})
    recovered = call()
    assert (report.backward if backward else report.forward).recoveries
    group = pairs // groups
    assert kernel.pairs <= pairs + group
    if route == "direct":
        assert kernel.pairs == pairs
    tolerance = 5e-5 if dtype == torch.float32 else 1e-2
    for one, other in zip(recovered, usual, strict=True):
        assert_close(one, other.double(), tolerance)
