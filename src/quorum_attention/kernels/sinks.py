"""Attention sinks: a logit for each head that takes part in the softmax and has no
value.

A sink is one more key of every row, with the value 0. So it needs no kernel: a row's
state begins with the sink instead of with no key, or a finished row takes it in:

    lse' = logaddexp(lse, sink),   out' = out exp(lse - lse').

A backward that is given lse' and out' computes the true probabilities, so any kernel's
will do. The gradient of the sink is that of a key with probability exp(sink - lse') and
value 0: minus the sum over rows of exp(sink - lse') delta.
"""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.tensors import row_blocks


def join_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Take the sinks into statistics, in place.

    Args:
        out: (b, h, rows, dv), any floating dtype.
        lse: (b, h, rows), fp32 or fp64.
        sinks: (h,), of the dtype of lse, on its device.
    """
    # The odds of the keys against the sink; a row without either keeps nothing.
    sinks = sinks[:, None]  # (h, 1)
    odds = lse - sinks
    odds.masked_fill_(lse == -torch.inf, -torch.inf)
    weight = odds.sigmoid_()
    out.mul_(weight.unsqueeze(-1))
    torch.logaddexp(lse, sinks, out=lse)


def sinks_gradient(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the gradient of the sinks, (h,), in their dtype and on their device.

    Args:
        grad_out, out: (*batch, h, rows, dv), on any device.
        lse: (*batch, h, rows), with the sinks in it.
        sinks: (h,).
        grad_lse: the upstream gradient of ``lse``, of its shape; None is 0.
    """
    device = out.device
    dtype = lse.dtype
    *batch_shape, heads, rows, width = out.shape
    # -1 means nothing where there are no rows.
    sizes = (math.prod(batch_shape), heads, rows)
    outs = out.reshape(*sizes, width)
    grad_outs = grad_out.reshape(*sizes, width)
    lses = lse.reshape(sizes)
    logits = sinks.detach()
    logits = logits.to(device=device, dtype=dtype)
    logits = logits.unsqueeze(1)  # (h, 1)
    sum_dtype = torch.promote_types(dtype, torch.float64)
    grad_sinks = torch.zeros(heads, dtype=sum_dtype, device=device)
    row_bytes = 3 * max(1, width) * lse.element_size()
    for block in row_blocks(*sizes, row_bytes):
        upstream = grad_outs[block].to(device=device, dtype=dtype)
        products = upstream * outs[block].to(dtype)
        delta = products.sum(dim=-1)  # (b, h, rows)
        if grad_lse is not None:
            grad_lses = grad_lse.reshape(sizes)
            delta -= grad_lses[block].to(device=device, dtype=dtype)
        block_heads = block[1]
        logit = logits[block_heads]
        log_share = logit - lses[block].to(device)
        # Without a sink, and without keys, the difference would be NaN.
        log_share.masked_fill_(logit == -torch.inf, -torch.inf)
        shares = log_share.exp_()
        parts = shares * delta
        grad_sinks[block_heads] -= parts.sum(dim=(0, 2), dtype=sum_dtype)
    return grad_sinks.to(device=sinks.device, dtype=sinks.dtype)
