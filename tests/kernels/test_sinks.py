"""Sinks joined to statistics, and their gradient, against a softmax with one more column."""

from __future__ import annotations

import torch

from quorum_attention.kernels.merge import join_sinks_, sinks_gradient


def test_a_sink_is_a_key_without_a_value() -> None:
    scores = torch.randn(2, 3, 5, 7, dtype=torch.float64)
    scores[0, 0, 1] = -torch.inf  # a row without keys
    values = torch.randn(2, 3, 7, 4, dtype=torch.float64)
    sinks = torch.tensor([0.3, -torch.inf, 5.0], dtype=torch.float64, requires_grad=True)
    column = sinks[None, :, None, None].expand(2, 3, 5, 1)
    p = torch.cat([scores, column], dim=-1).softmax(-1)[..., :7]
    wanted = p @ values
    grad_out = torch.randn_like(wanted)
    (of_sinks,) = torch.autograd.grad(wanted, sinks, grad_out)

    lse = scores.logsumexp(-1)
    out = scores.softmax(-1).nan_to_num(0.0) @ values
    join_sinks_(out, lse, sinks.detach())
    assert torch.allclose(out, wanted)
    assert torch.allclose(lse, torch.cat([scores, column], dim=-1).logsumexp(-1))
    assert torch.allclose(sinks_gradient(grad_out, out, lse, sinks), of_sinks.nan_to_num(0.0))


def test_a_row_with_neither_key_nor_sink_stays_empty() -> None:
    out, lse = torch.zeros(1, 1, 2, 3), torch.full((1, 1, 2), -torch.inf)
    none = torch.full((1,), -torch.inf)
    join_sinks_(out, lse, none)
    assert torch.equal(out, torch.zeros(1, 1, 2, 3))
    assert bool((lse == -torch.inf).all())
    assert torch.equal(sinks_gradient(torch.ones_like(out), out, lse, none), torch.zeros(1))


def test_calls_without_rows_have_a_gradient_of_their_sinks() -> None:
    sinks = torch.randn(3)
    for shape in ((2, 3, 0, 4), (0, 3, 5, 4), (2, 3, 5, 0), (0, 3, 0, 0), (2, 0, 3, 0, 4)):
        out = torch.zeros(shape)
        found = sinks_gradient(out, out, torch.zeros(shape[:-1]), sinks)
        assert torch.equal(found, torch.zeros(3))
