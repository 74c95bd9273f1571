"""All tasks at once: the same pairs, the same result, inside the planned memory."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import assert_close, exact, inputs
from helpers_memory import usage

import quorum_attention as qa
from quorum_attention.execution.routes.over_inputs import Blockwise
from quorum_attention.execution.routes.slots import Slots


def pair(n: int, over_inputs: bool | None, backward: bool = False, **sizes) -> qa.Plan:
    return qa.plan(
        n, levels=(7,), tile=8, over_inputs=over_inputs, device="cpu", backward=backward, **sizes
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("sizes", [(200, 200), (200, 130), (90, 210)])
def test_results_are_those_of_one_task_after_the_other(sizes, causal, dtype) -> None:
    n, n_keys = sizes
    given = inputs(n, n_keys, heads=4, kv_heads=2, head_dim=16, dtype=dtype)
    shape = {
        "n_keys": n_keys, "heads": 4, "kv_heads": 2, "head_dim": 16, "dtype": dtype,
        "is_causal": causal,
    }  # fmt: skip
    options = {"is_causal": causal, "enable_gqa": True}
    results = []
    for over_inputs in (True, False):
        plans = [pair(n, over_inputs, backward, **shape) for backward in (False, True)]
        route = Blockwise if over_inputs else Slots
        assert all(isinstance(plan.schedule.route, route) for plan in plans)
        out, lse = qa.attention_with_lse(*given.three, plan=plans[0], **options)
        grads = qa.attention_backward(
            given.grad_out, *given.three, out, lse, plan=plans[1], **options
        )
        results.append((out, lse, *grads))
    reference = exact(given, is_causal=causal, gradients=True)
    for swept, one_by_one in zip(*results, strict=True):
        tolerance = 1e-2 if dtype == torch.float16 else 1e-4
        assert_close(swept, one_by_one.double(), tolerance)
    assert_close(results[0][0], reference.out, 1e-2)


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.usefixtures("one_thread")
def test_memory_stays_within_the_plan(backward: bool, dtype: torch.dtype) -> None:
    given = inputs(600, heads=2, head_dim=16, dtype=dtype)
    plan = pair(600, True, backward, heads=2, head_dim=16, dtype=dtype, is_causal=True)
    out, lse = qa.attention_with_lse(*given.three, is_causal=True)

    def call() -> None:
        if backward:
            qa.attention_backward(given.grad_out, *given.three, out, lse, is_causal=True, plan=plan)
        else:
            qa.attention(*given.three, is_causal=True, plan=plan)

    call()
    assert usage(call).peak <= plan.peak_bytes
