"""fp16 gradients near the edges of fp16 on a GPU: sinks, few keys, loss-scaled gradients, on every
route and kernel, against float64. (tests/execution/test_scaled_draws.py is the like for CPUs.)

An overflow on the way must cost nothing: inputs lie under the results by the time that it is seen,
or in host memory, or are what other kernels still read.
"""

from __future__ import annotations

import pytest
import torch
from helpers_attention import Inputs, exact
from helpers_fa4 import FA4
from helpers_fp16 import ROUTES, Way, drawn, sink, wrong

import quorum_attention as qa

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
DEVICE = "cuda"
KERNELS = (FA4, "auto", "native", "flash", "cudnn", "efficient")
# cuDNN makes a plan of every shape of rectangle, some tenths of a second each.
DRAWS = {"cudnn": 12, "auto": 24}
# What they return is fp16: the others have fp32 where this overflows.
NARROW = ("fa4", "flash", "cudnn", "efficient", "cpu")


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("route", ROUTES)
def test_no_infinity_that_float64_does_not_have(route: str, kernel: str) -> None:
    """Every result that fp16 can hold is finite and right (invariant 6)."""
    way, found, refused = Way(route, DEVICE, kernel), [], set()
    draws = DRAWS.get(kernel, 40)
    for seed in range(draws):
        try:
            found.append(wrong(drawn(seed, few_sizes=True), way, seed))
        except NotImplementedError as error:  # grouped heads, for some
            refused.add(str(error))
    assert [words for words in found if words is not None] == []
    assert len(found) >= draws // 4, refused


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
