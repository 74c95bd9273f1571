"""A backward over a part of its rows' keys: the lse and the output are of others as well."""

from __future__ import annotations

import math

import pytest
import torch
from helpers_plans import passing

import quorum_attention as qa

# A backward of 48 tokens and two heads.
SIZES = {"heads": 2, "head_dim": 32, "dtype": torch.float16, "kernel": "cpu", "tile": 8}
CUT = {"levels": (3,), "backward": True, **SIZES}
ROUTES = {
    "uncut": lambda: {"depth": 0},
    "together": lambda: {"plan": qa.plan(48, n_cap=1, over_inputs=True, **CUT)},
    "in slots": lambda: {"plan": qa.plan(48, n_cap=2, over_inputs=False, **CUT)},
    "passing": lambda: {"plan": passing(qa.plan(48, over_inputs=False, **CUT), 32, 16)},
}


@pytest.mark.parametrize("n", [64, 600])
def test_keys_that_are_a_part_of_their_rows(n: int) -> None:
    """The lse and the output are of all keys, the call is of some: its gradients are of all rows'
    probabilities, and not as if its keys were all there are."""
    g = torch.Generator().manual_seed(n)
    q, k, v, grad = (torch.randn((1, 1, n, 16), generator=g).half() for _ in range(4))
    three = [t.double().requires_grad_() for t in (q, k, v)]
    right = torch.autograd.grad(
        torch.nn.functional.scaled_dot_product_attention(*three), three, grad.double()
    )
    out, lse = qa.attention_with_lse(q, k, v)
    for part in (slice(0, 40), slice(40, n)):
        found = qa.attention_backward(grad, q, k[:, :, part], v[:, :, part], out, lse, kernel="cpu")
        for got, want in zip(found[1:], right[1:], strict=False):
            off = (got.double() - want[:, :, part]).abs().max()
            assert float(off) < 0.01 * float(want.abs().max())


@pytest.mark.parametrize("lse", [math.nan, math.inf])
@pytest.mark.parametrize("route", ROUTES)
def test_a_row_that_is_broken_by_keys_elsewhere_stays_so(lse: float, route: str) -> None:
    """Its query and these keys are finite, and so would its gradients be, if these were all."""
    q, k, v, grad = (torch.randn(1, 2, 48, 32).half() for _ in range(4))
    out, whole = qa.attention_with_lse(q, k, v)
    out[:, :, 5], whole[:, :, 5] = torch.nan, lse
    found = qa.attention_backward(grad, q, k, v, out, whole, **ROUTES[route]())
    p = torch.exp(q.double() @ k.double().mT / math.sqrt(32) - whole.double().unsqueeze(-1))
    assert bool(found[0][:, :, 5].isnan().all())
    assert bool(found[0][:, :, :5].isfinite().all())
    assert bool(found[1].isnan().all())
    assert torch.equal(found[2].isnan(), (p.mT @ grad.double()).isnan())
