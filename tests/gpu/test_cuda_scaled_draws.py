"""fp16 gradients of a sink on a GPU, near the edges of fp16, as users call it.

Draws of the like, on every kernel: tests/random_calls.
"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs, exact, sink

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"


@pytest.mark.parametrize("loss_scale", [1.0, 2.0**12])
@pytest.mark.parametrize("home", ["cpu", DEVICE])
@pytest.mark.parametrize("heads", [1, 8])
def test_a_sink_as_users_call_it(heads: int, home: str, loss_scale: float) -> None:
    """Through autograd, in the smallest budget that works, and in one that is none."""
    given = sink(2048, heads)
    scaled = (given.grad_out.float() * loss_scale).half()
    made = Inputs(*given.three, scaled)
    reference = exact(made, is_causal=True, gradients=True)
    leaves = [t.to(home).requires_grad_() for t in made.three]
    call = {"is_causal": True, "devices": DEVICE}
    with pytest.raises(qa.BudgetError) as refused:
        qa.attention(*leaves, **call, budget=1000)
    assert reference.grads is not None
    for budget in (refused.value.smallest_bytes, None):
        out = qa.attention(*leaves, **call, budget=budget)
        grads = torch.autograd.grad(out, leaves, scaled.to(home))
        for actual, wanted in zip(grads, reference.grads, strict=True):
            found = actual.cpu().double() / loss_scale
            torch.testing.assert_close(found, wanted / loss_scale, atol=2e-3, rtol=0)
