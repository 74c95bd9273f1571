"""Attention sinks: a logit for each head that takes part in the softmax and has no value.

A sink is one more key of every row, with the value 0. So it needs no kernel: a row's state begins
with the sink instead of with no key, or a finished row takes it in:

    lse' = logaddexp(lse, sink),   out' = out exp(lse - lse').

A backward that is given lse' and out' computes the true probabilities, so any kernel's will do. The
gradient of the sink is that of a key with probability exp(sink - lse') and value 0: minus the sum
over rows of exp(sink - lse') delta.
"""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.tensors import row_blocks


def join_sinks_(out: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> None:
    """Takes the sinks into statistics, in place.

    Args:
        out: (b, h, rows, dv), any floating dtype.
        lse: (b, h, rows), fp32 or fp64.
        sinks: (h,), of the dtype of lse, on its device.
    """
    # The odds of the keys against the sink; a row without either keeps nothing.
    apart = (lse - sinks[:, None]).masked_fill_(lse == -torch.inf, -torch.inf)
    out.mul_(apart.sigmoid_().unsqueeze(-1))
    torch.logaddexp(lse, sinks[:, None], out=lse)


def sinks_gradient(
    grad_out: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    sinks: torch.Tensor,
    grad_lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """The gradient of the sinks, (h,), in their dtype and on their device.

    Args:
        grad_out, out: (*batch, h, rows, dv), on any device.
        lse: (*batch, h, rows), with the sinks in it.
        sinks: (h,).
        grad_lse: the upstream gradient of ``lse``, of its shape; None is 0.
    """
    heads, rows, width = out.shape[-3:]
    own = sinks.detach().to(device=out.device, dtype=lse.dtype)
    state = torch.promote_types(lse.dtype, torch.float64)
    sums = torch.zeros(heads, dtype=state, device=out.device)
    batch = math.prod(out.shape[:-3])  # -1 means nothing where there are no rows
    grads, outs = (t.reshape(batch, heads, rows, width) for t in (grad_out, out))
    lses = lse.reshape(batch, heads, rows)
    for block in row_blocks(lses.shape[0], heads, rows, 3 * max(1, width) * lse.element_size()):
        upstream = grads[block].to(device=out.device, dtype=lse.dtype)
        delta = (upstream * outs[block].to(lse.dtype)).sum(dim=-1)
        if grad_lse is not None:
            given = grad_lse.reshape(lses.shape)[block]
            delta -= given.to(device=out.device, dtype=lse.dtype)
        logit = own[block[1]][:, None]
        share = (logit - lses[block].to(out.device)).masked_fill_(logit == -torch.inf, -torch.inf)
        sums[block[1]] -= (share.exp_() * delta).sum(dim=(0, 2), dtype=sums.dtype)
    return sums.to(device=sinks.device, dtype=sinks.dtype)
