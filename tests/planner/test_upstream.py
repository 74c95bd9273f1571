"""Whatever gradient autograd hands over, the backward stays within what was promised.

The gradient of a sum is one number expanded, the one of a transposed loss has other strides, the
one of a cast another dtype: none of it may need memory that ``estimate`` did not count, and a
budget in which the backward would not fit is refused by the forward.
"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import GRADIENT_TOLERANCE, Inputs, assert_close, exact, inputs
from helpers_memory import usage
from helpers_passes import smallest_budget

import quorum_attention as qa
from quorum_attention.kernels.registry import get_kernel
from quorum_attention.planner import decide

pytestmark = pytest.mark.usefixtures("one_thread")
N = 700
UPSTREAM = {
    "of a sum": lambda g: torch.ones((), dtype=g.dtype).expand(g.shape),
    "of rows' sums": lambda g: g[..., :1].expand(g.shape),
    "transposed": lambda g: g.transpose(-1, -2).contiguous().transpose(-1, -2),
    "as it should be": lambda g: g,
}


def sizes(dtype: torch.dtype) -> dict[str, object]:
    return {"heads": 4, "head_dim": 16, "dtype": dtype, "device": "cpu", "is_causal": True}


@pytest.mark.parametrize("upstream", list(UPSTREAM))
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("share", [1.0, 0.0])
def test_backward_stays_within_the_estimate(upstream, dtype, share) -> None:
    """From the smallest budget that works (share 0) to one in which the call need not be cut."""
    most = qa.plan(N, levels=(), backward=True, **sizes(dtype)).peak_bytes
    least = smallest_budget(lambda most: qa.plan(N, budget=most, backward=True, **sizes(dtype)))
    budget = int(least + share * (most - least))
    promised = qa.estimate(N, budget=budget, **sizes(dtype))
    made = inputs(N, heads=4, head_dim=16, dtype=dtype)
    grad_out = UPSTREAM[upstream](made.grad_out)
    leaves = [t.clone().requires_grad_() for t in made.three]
    report = qa.Report()

    def forward() -> torch.Tensor:
        return qa.attention(*leaves, is_causal=True, budget=budget, report=report)

    out = forward()
    peak = usage(lambda: torch.autograd.grad(out, leaves, grad_out)).peak
    assert peak <= report.backward.planned_peak_bytes <= promised.backward.peak_bytes <= budget
    grads = torch.autograd.grad(forward(), leaves, grad_out)
    reference = exact(Inputs(*made.three, grad_out), is_causal=True, gradients=True)
    assert_close(grads, reference.grads, GRADIENT_TOLERANCE[dtype])


@pytest.mark.parametrize("out_dtype", [None, torch.float32])
@pytest.mark.parametrize("rival", [None, "dense"])
def test_forward_refuses_what_the_backward_would_not_fit_in(out_dtype, rival, monkeypatch) -> None:
    """With another kernel to choose from as well (as on a GPU), of which none may fit."""
    others = () if rival is None else (get_kernel(rival),)
    monkeypatch.setattr(decide, "rivals", lambda *given: others)
    made = inputs(N, heads=4, head_dim=16, dtype=torch.float16)
    leaves = [t.clone().requires_grad_() for t in made.three]
    call = {"is_causal": True, "out_dtype": out_dtype}

    def forward(budget: int) -> torch.Tensor:
        return qa.attention(*leaves, budget=budget, **call)

    with torch.no_grad():
        forward_alone = smallest_budget(forward)
    enough = smallest_budget(forward, match=r"^(forward|backward) pass: ")
    assert enough >= forward_alone
    if rival is None:
        # This kernel's backward takes more than its forward.
        assert enough > forward_alone
        with pytest.raises(qa.BudgetError, match="backward pass: ") as refused:
            forward(forward_alone)
        assert refused.value.smallest_bytes == enough
    forward(enough).sum().backward()
    assert all(torch.isfinite(leaf.grad).all() for leaf in leaves)
