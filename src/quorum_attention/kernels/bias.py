"""Which rows of a rectangle an additive mask leaves without any key."""

from __future__ import annotations

import math

import torch

from quorum_attention.kernels.tensors import BLOCK_BYTES, row_blocks

BASE_TWO_LOWEST = torch.finfo(torch.float32).min * math.log(2.0)
"""Kernels that compute exponentials to base 2 in fp32 treat this score, and lower ones, as -inf.
Masks in bf16 and fp32 that hold their dtype's lowest number instead of -inf reach it."""


def dead_rows(
    bias: torch.Tensor, n_rows: int, causal: bool, lowest: float = -math.inf
) -> torch.Tensor:
    """Rows that ``bias`` (together with the causal mask, if any) leaves no key.

    Args:
        bias: additive mask (b or 1, h or 1, n_rows or 1, n_keys or 1), at least one key; -inf
            masks a pair.
        n_rows: query rows of the rectangle.
        causal: the rectangle is a causal square.
        lowest: a value this low or lower masks a pair as well.

    Returns:
        bool tensor broadcastable to (b, h, n_rows), True where a row has no key.
    """
    if not causal:
        # NaN is not -inf: a row whose mask holds NaN is not dead, and its result is NaN.
        return bias.amax(dim=-1) <= lowest
    return _first_key(bias, lowest) > torch.arange(n_rows, device=bias.device)


def dead_rows_bytes(batch: int, heads: int, rows: int, keys: int, causal: bool) -> int:
    """Upper bound of the bytes that ``dead_rows`` takes, result and temporaries, for fp64."""
    block = min(BLOCK_BYTES, batch * heads * rows * keys)
    return batch * heads * rows * 9 + (rows * 8 + 2 * block if causal else 0)


def _first_key(bias: torch.Tensor, lowest: float) -> torch.Tensor:
    """Index of the first key each row keeps, int64 (b, h, rows); the largest int64 if none."""
    batch, heads, rows, keys = bias.shape
    never = torch.iinfo(torch.int64).max
    first = torch.empty((batch, heads, rows), dtype=torch.int64, device=bias.device)
    for block in row_blocks(batch, heads, rows, keys):
        alive = (bias[block] <= lowest).logical_not_()
        # argmax returns the first of several ones.
        first[block] = alive.view(torch.uint8).argmax(dim=-1)
        first[block].masked_fill_(~alive.any(dim=-1), never)
    return first


def aligned_bias(bias: torch.Tensor, n_keys: int) -> torch.Tensor:
    """``bias`` as operators with vector loads need it; copied only where it is not so already.

    It has all ``n_keys`` columns, its last dimension is contiguous, its address and all other
    strides are multiples of 16 bytes, and its strides fit 32 bits.
    """
    step = max(1, 16 // bias.element_size())
    strides = [s for s, n in zip(bias.stride()[:-1], bias.shape[:-1], strict=True) if n > 1]
    if (
        bias.shape[-1] == n_keys
        and bias.stride(-1) == 1
        and bias.data_ptr() % 16 == 0
        and all(s % step == 0 and s < 2**31 for s in strides)
    ):
        return bias
    rows = bias.shape[:-1]
    padded = torch.empty((*rows, -(-n_keys // step) * step), dtype=bias.dtype, device=bias.device)
    padded[..., :n_keys].copy_(bias.expand(*rows, n_keys))
    return padded[..., :n_keys]


# Attention sinks: a logit for each head that takes part in the softmax and has no value.
#
# A sink is one more key of every row, with the value 0. So it needs no kernel: a row's state begins
# with the sink instead of with no key, or a finished row takes it in:
#
#     lse' = logaddexp(lse, sink),   out' = out exp(lse - lse').
#
# A backward that is given lse' and out' computes the true probabilities, so any kernel's will do.
# The gradient of the sink is that of a key with probability exp(sink - lse') and value 0: minus the
# sum over rows of exp(sink - lse') delta.


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
