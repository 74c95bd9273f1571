"""A small call as one kernel call on the inputs as they lie: no plan, nothing cut, nothing merged.

What ``direct`` does for a schedule that holds everything at once, for calls so short that making
the schedule would take longer (``planner/small.py`` says which).
"""

from __future__ import annotations

import torch

from quorum_attention.execution.call import Call, Three, operand
from quorum_attention.execution.masks import MaskView
from quorum_attention.execution.scaling import all_finite, scales
from quorum_attention.kernels.outside import capturing
from quorum_attention.kernels.traits import whole_calls


def forward_at_once(call: Call, out_dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """(out, lse): out (*batch, heads, n_queries, value_dim) in ``out_dtype``, lse without the last
    dimension. At most one batch dimension; the kernel takes whole calls."""
    kernel = whole_calls(call.kernel)
    assert kernel is not None
    out, lse = kernel.whole_forward(
        _four(call.query), _four(call.key), _four(call.value), call.work.is_causal, call.scale,
        _bias(call), out_dtype,
    )  # fmt: skip
    out = out if out.dtype == out_dtype else out.to(out_dtype)
    return _back(out, call), _back(lse, call)


def backward_at_once(
    call: Call, grad_out: torch.Tensor, out: torch.Tensor, lse: torch.Tensor
) -> Three | None:
    """Gradients of query, key and value; grad_out and out in the inputs' dtype, and beside them,
    however they lie.

    None where an operator did not bring them out finite in 16 bits: they may be finite once they
    are scaled (execution/backward.py).
    """
    kernel, dtype = whole_calls(call.kernel), call.work.dtype
    assert kernel is not None
    # A row without a key has lse -inf; with 0 in its place exp(-inf - 0) is 0, not NaN.
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    grads = kernel.whole_backward(
        operand(_four(grad_out), dtype), _four(call.query), _four(call.key), _four(call.value),
        operand(_four(out), dtype),
        lse if lse.dim() == 3 else lse.unsqueeze(0), call.work.is_causal, call.scale, _bias(call),
        dtype,
    )  # fmt: skip
    if scales(call.kernel, call.work) and not capturing(call.device) and not all_finite(grads):
        return None
    query, key, value = (_back(g if g.dtype == dtype else g.to(dtype), call) for g in grads)
    return query, key, value


def _four(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.dim() == 4 else tensor.unsqueeze(0)


def _back(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    return tensor if call.work.batch_shape else tensor.squeeze(0)


def _bias(call: Call) -> torch.Tensor | None:
    """The call's mask, additive, no dimension expanded; (b, h, rows, columns), each maybe 1."""
    view: MaskView | None = call.mask
    if view is None:
        return None
    mask, dtype = _four(view.mask).to(call.device), call.work.dtype
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    kept = torch.zeros((), dtype=dtype, device=call.device)
    return torch.where(mask, kept, torch.full_like(kept, -torch.inf))
