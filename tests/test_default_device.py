"""A program's default device (``torch.set_default_device``) is for its own tensors: ours say where
they are made. With "cuda" as the default, page-locked memory cannot be asked for without a device,
nor random numbers of a generator of the CPU."""

from __future__ import annotations

import pytest
import torch
from helpers_attention import inputs
from helpers_plans import passing

import quorum_attention as qa


@pytest.mark.parametrize("route", ["slots", "passing"])
def test_a_scaled_backward_in_any_route(route: str) -> None:
    """In 16 bits it asks the host whether a gradient overflowed."""
    given = inputs(101, heads=2, kv_heads=2, head_dim=8, dtype=torch.float16)
    plan = qa.plan(
        101, heads=2, head_dim=8, dtype=torch.float16, levels=(7,), layout="balanced",
        over_inputs=False, kernel="cpu", backward=True, device="cpu",
    )  # fmt: skip
    if route == "passing":
        plan = passing(plan, 32, 20)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            out, lse = qa.attention_with_lse(*given.three)
            found.append(qa.attention_backward(given.grad_out, *given.three, out, lse, plan=plan))
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


def test_the_gradient_of_sinks() -> None:
    given = inputs(20, heads=2, kv_heads=2, head_dim=8, dtype=torch.float32)
    mask = qa.Mask(sinks=torch.zeros(2))
    out, lse = qa.attention_with_lse(*given.three, mask)
    found = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            grads = qa.attention_backward(
                given.grad_out, *given.three, out, lse, mask, grad_sinks=True
            )
        found.append(grads[3])
    assert torch.equal(*found)
