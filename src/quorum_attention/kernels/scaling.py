"""Keeps a backward inside fp16's range, and undoes that (design, section 2).

At long N the true probabilities and their gradients are near 1/N, in fp16's subnormal
range, and every production kernel rounds both to the inputs' dtype. Given ``lse - shift
ln 2`` it computes ``2**shift P``, and ``grad_out`` divided by a power of two keeps
``dS`` below fp16's largest number. Each scales all three gradients by the same power of
two, which one fp32 factor undoes exactly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from quorum_attention.kernels.merge import by_head
from quorum_attention.kernels.tensors import Block, row_blocks
from quorum_attention.kernels.triton_launch import (
    launch_divide,
    launch_norms,
    triton_takes,
)

# |dS| may be up to 2**15; fp16's largest number, 65,504, is a little below 2**16.
LOG2_LARGEST = 15
# log2 of the scaled probabilities, 2**shift P, of a row that attends to all keys
# evenly.
_LOG2_TYPICAL = -8
_LARGEST_SHIFT = 14
# log2 of the largest divisor of ``grad_out``, and of the largest factor.
_LARGEST_EXPONENT = 60


@dataclass(slots=True)
class Scaling:
    """How a task's backward is scaled.

    Attributes:
        shift: probabilities are computed times 2**shift.
        unscale: (b, key heads) fp32, powers of two by which ``grad_out`` was divided;
            None is 1.
        overflow: shaped like ``unscale``, int32; 1 is set for heads where a partial
            gradient is not finite; None: not checked.
    """

    shift: int = 0
    unscale: torch.Tensor | None = None
    overflow: torch.Tensor | None = None


def usual_shift(n_keys: int) -> int:
    """Return the shift for rows of up to ``n_keys`` keys: 0 if they are few enough to
    need none."""
    log2_keys = math.ceil(math.log2(max(1, n_keys)))
    shift = max(0, log2_keys + _LOG2_TYPICAL)
    return min(_LARGEST_SHIFT, shift)


def divide_gradient_(
    grad_out: torch.Tensor,
    value_norm: torch.Tensor,
    unscale: torch.Tensor,
    shift: int,
) -> None:
    """Divide ``grad_out`` in place by a power of two for every key/value head; the host
    waits for nothing.

    Args:
        grad_out: (b, h, n, dv).
        value_norm: (b, hk) fp32, the largest norms of rows of value.
        unscale: (b, hk) fp32, receives the divisors.
        shift: probabilities will be computed times 2**shift.
    """
    grad_norm = largest_norms(grad_out, value_norm.shape[1])
    if grad_out.numel() > 0 and triton_takes(grad_out):
        launch_divide(
            grad_out,
            grad_norm,
            value_norm,
            unscale,
            shift - LOG2_LARGEST,
            _LARGEST_EXPONENT,
        )
        return
    exponents = divisor_exponents(grad_norm, value_norm, shift)
    unscale.copy_(power_of_two(exponents))
    # The reciprocal of a power of two is exact.
    factors = by_head(unscale.reciprocal(), grad_out.shape[1])
    for block in _blocks(grad_out):
        grad_out[block].mul_(factors[block[:2]])


def largest_norms(tensor: torch.Tensor, key_heads: int) -> torch.Tensor:
    """Return the largest Euclidean norm of a finite row of (b, h, n, d) for each key
    head, (b, key_heads) fp32.

    Rows that are not finite give results that are not finite, however they are scaled.
    They are left out, so that the scale is right for all others.
    """
    batch, heads = tensor.shape[:2]
    if triton_takes(tensor):
        norms = torch.zeros(
            (batch, key_heads),
            dtype=torch.float32,
            device=tensor.device,
        )
        launch_norms(tensor, norms)
        return norms
    largest = torch.zeros(
        (batch, heads),
        dtype=torch.float32,
        device=tensor.device,
    )
    for block in _blocks(tensor):
        norms = torch.linalg.vector_norm(
            tensor[block],
            dim=-1,
            dtype=torch.float32,
        )
        norms.nan_to_num_(0.0, posinf=0.0)
        largest_of_block = norms.amax(-1)
        largest_of_heads = largest[block[:2]]  # a view
        torch.maximum(largest_of_heads, largest_of_block, out=largest_of_heads)
    group = heads // key_heads
    by_key_head = largest.view(batch, key_heads, group)
    return by_key_head.amax(2)


def divisor_exponents(
    grad_norm: torch.Tensor, value_norm: torch.Tensor, shift: int
) -> torch.Tensor:
    """Return log2 of the divisors of ``grad_out`` (``divide_gradient_``), (b, hk)
    int32; 0 where there is nothing to scale.

    Args:
        grad_norm, value_norm: (b, hk) fp32, of ``largest_norms``.
    """
    # Bounds |dS| <= 2**shift 2 g v, and twice |P dO| of a single pair.
    bound = grad_norm * (2 * value_norm).clamp_min(2.0)
    bound = bound.clamp_max(torch.finfo(bound.dtype).max)
    # bound < 2**exponent, and at least half of that unless it is 0
    _, exponents = torch.frexp(bound)
    exponents = exponents + (shift - LOG2_LARGEST)
    exponents.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT)
    return exponents * (bound > 0)


def power_of_two(exponents: torch.Tensor) -> torch.Tensor:
    """Return 2**exponents in fp32, from its bits: exact, as a device's exp2 need not
    be."""
    biased_exponents = exponents + 127
    return (biased_exponents << 23).view(torch.float32)


def _blocks(tensor: torch.Tensor) -> Iterator[Block]:
    batch, heads, rows, width = tensor.shape
    # A CPU converts 16-bit rows to fp32 first.
    row_bytes = 4 * max(1, width)
    return row_blocks(batch, heads, rows, row_bytes)
