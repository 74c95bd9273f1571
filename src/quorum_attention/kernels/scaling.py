"""Keeps a backward inside fp16's range, and undoes that (design, section 2).

At long N the true probabilities and their gradients are near 1/N, in fp16's subnormal range, and
every production kernel rounds both to the inputs' dtype. Given ``lse - shift ln 2`` it computes
``2**shift P``, and ``grad_out`` divided by a power of two keeps ``dS`` below fp16's largest number.
Each scales all three gradients by the same power of two, which one fp32 factor undoes exactly.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from quorum_attention.kernels.merge import launch_divide, triton_available
from quorum_attention.kernels.tensors import row_blocks

# |dS| may be up to 2**15; fp16's largest number, 65,504, is a little below 2**16.
LOG2_LARGEST = 15
# log2 of the scaled probabilities, 2**shift P, of a row that attends to all keys evenly.
_LOG2_TYPICAL = -8
_LARGEST_SHIFT = 14


@dataclass(slots=True)
class Scaling:
    """How a task's backward is scaled.

    Attributes:
        shift: probabilities are computed times 2**shift.
        unscale: (b, key heads) fp32, powers of two: what ``grad_out`` was divided by; None is 1.
        overflow: shaped like ``unscale``, int32; 1 is set for heads where a partial gradient is
            not finite; None: not checked.
    """

    shift: int = 0
    unscale: torch.Tensor | None = None
    overflow: torch.Tensor | None = None


def usual_shift(n_keys: int) -> int:
    """The shift for rows of up to ``n_keys`` keys: 0 if they are few enough to need none."""
    return min(_LARGEST_SHIFT, max(0, math.ceil(math.log2(max(1, n_keys))) + _LOG2_TYPICAL))


def divide_gradient_(
    grad_out: torch.Tensor, value: torch.Tensor, unscale: torch.Tensor, shift: int
) -> None:
    """Divide ``grad_out`` in place by a power of two for every key/value head.

    Args:
        grad_out: (b, h, n, dv).
        value: (b, hk, m, dv).
        unscale: (b, hk) fp32, receives the divisors.
        shift: probabilities will be computed times 2**shift.
    """
    dense = grad_out.is_contiguous() and value.is_contiguous()
    if grad_out.is_cuda and dense and triton_available():
        launch_divide(grad_out, value, unscale, shift - LOG2_LARGEST)
        return
    batch, key_heads = unscale.shape
    shared = grad_out.shape[1] // max(1, key_heads)
    for entry in range(batch):
        for head in range(key_heads):
            part = grad_out[entry : entry + 1, head * shared : (head + 1) * shared]
            largest = largest_norm(value[entry : entry + 1, head : head + 1])
            exponent = divisor_exponent(largest_norm(part), largest, shift)
            unscale[entry, head] = 2.0**exponent
            if exponent:
                for block in _blocks(part):
                    part[block].mul_(2.0**-exponent)


def largest_norm(tensor: torch.Tensor) -> float:
    """The largest Euclidean norm of the finite rows of (b, h, n, d).

    Rows that are not finite give results that are not finite, however they are scaled. They are
    left out, so that the scale is right for all others.
    """
    largest = 0.0
    for block in _blocks(tensor):
        norms = torch.linalg.vector_norm(tensor[block], dim=-1, dtype=torch.float32)
        largest = max(largest, float(norms.nan_to_num(0.0, posinf=0.0).max()))
    return largest


def divisor_exponent(gradient: float, value: float, shift: int) -> int:
    """log2 of the divisor of ``grad_out``; 0 where there is nothing to scale.

    Args:
        gradient, value: the largest row norms of ``grad_out`` and of the values.
        shift: see ``divide_gradient_``.
    """
    # Bounds |dS| <= 2**shift 2 g v, and twice |P dO| of a single pair.
    bound = gradient * max(2 * value, 2.0)
    if not 0 < bound < math.inf:
        return 0
    return max(-60, min(60, math.ceil(math.log2(bound)) + shift - LOG2_LARGEST))


def _blocks(tensor: torch.Tensor) -> list[tuple[slice, slice, slice]]:
    batch, heads, rows, width = tensor.shape
    # 16-bit rows are converted to fp32.
    return list(row_blocks(batch, heads, rows, 4 * max(1, width)))
