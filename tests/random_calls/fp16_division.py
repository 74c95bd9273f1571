"""By how much the fp16 backward divides upstream gradients of a head, lest dS or sums
overflow.

The arithmetic is that of kernels/scaling.py and execution/scaling.py. Small elements
are divided along, and may be lost as too small: docs/random-call-bounds.md, "Divided
gradients".
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from random_calls.head_groups import largest_of_group

_LARGEST = torch.finfo(torch.float16).max
# A pass divides so that |dS| is at most 2**15, so at least 2**14.
_LARGEST_GRAD_S = 2.0**15
_STEP_BITS = 8
# Exponents of the three columns that carry a gradient of the log-sum-exp
# (call/lse_columns.py).
_SMALLEST_EXPONENT = -14
_LARGEST_EXPONENT = 15


def grad_s_limit(
    grad_out: torch.Tensor,
    value: torch.Tensor,
    grad_lse: torch.Tensor | None,
    n_shared: int,
) -> torch.Tensor:
    """The bound of |dS| that a head's divisor is computed from: 2 |dO| |V| of its
    largest rows, and twice |dO| at least.

    A gradient of the log-sum-exp is in three columns of dO, beside a column of 1 in V.

    Args:
        grad_out, value: (b, h, n, dv) and (b, h, m, dv).
        grad_lse: (b, h, n), 0 in rows without keys; or None.

    Returns:
        (b, h, 1, 1), the same in query heads that share a key head; 0 if there is no
        row.
    """
    if not grad_out.numel() or not value.numel():
        return grad_out.new_zeros((*grad_out.shape[:2], 1, 1))
    grad_norms = _row_norms(grad_out)
    value_norm = _row_norms(value).amax(-1, keepdim=True)  # (b, h, 1)
    if grad_lse is not None:
        sizes = grad_lse.abs()
        in_units_of_value = sizes / value_norm.clamp(1.0, 2.0**14)
        # A power of two above the size.
        exponent = torch.frexp(in_units_of_value).exponent.masked_fill(sizes == 0, -14)
        exponent = exponent.clamp(_SMALLEST_EXPONENT, _LARGEST_EXPONENT)
        column = torch.ldexp(torch.ones_like(grad_norms), exponent)
        grad_norms = (grad_norms.square() + 3 * column.square()).sqrt()
        value_norm = (value_norm.square() + 1).sqrt()
    grad_norm = largest_of_group(grad_norms.amax(-1, keepdim=True), n_shared)
    return (grad_norm * (2 * value_norm).clamp(min=2.0)).unsqueeze(-1)


def sum_divisor(
    limit: torch.Tensor, gradients: Sequence[torch.Tensor], n_shared: int
) -> torch.Tensor:
    """The divisor on top of that of dS, because the sum over pairs overflows; (b, h, 1,
    1).

    |dS| of one pair may be 2**15. Where the gradient in those units is beyond the largest number of
    fp16, the head takes as many steps of 2**8 as bring the gradient back. The gradient
    here is the whole sum: parts that are larger than the whole are not allowed for.

    Args:
        limit: of ``grad_s_limit``.
        gradients: dQ (b, h, n, d), dK and dV (b, kv_heads, m, d).
    """
    largest = torch.zeros_like(limit)
    for gradient in gradients:
        if not gradient.numel():
            continue
        element = gradient.nan_to_num(0.0, 0.0, 0.0).abs().amax((-2, -1), keepdim=True)
        if element.shape[1] != limit.shape[1]:
            element = element.repeat_interleave(n_shared, 1)
        largest = torch.maximum(largest, largest_of_group(element, n_shared))
    bits_beyond = torch.log2(largest * _LARGEST_GRAD_S / limit / _LARGEST)
    n_steps = (bits_beyond / _STEP_BITS).ceil().clamp(min=0.0)
    n_steps = torch.where((largest > 0) & (limit > 0), n_steps, 0.0)
    return 2.0 ** (_STEP_BITS * n_steps)


def divisor(limit: torch.Tensor, of_sums: torch.Tensor) -> torch.Tensor:
    """The most that a head may be divided by, (b, h, 1, 1), at least 1."""
    return (limit * of_sums / (_LARGEST_GRAD_S / 2)).clamp(min=1.0)


def _row_norms(tensor: torch.Tensor) -> torch.Tensor:
    """(b, h, n, d) -> (b, h, n), 0 where they are not finite."""
    return tensor.norm(dim=-1).nan_to_num(0.0, 0.0, 0.0)
