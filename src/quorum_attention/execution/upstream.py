"""Upstream gradients whose numbers are too large or too small for the inputs' dtype.

Numbers of an fp32 gradient for fp16 inputs may be too large or too small for fp16. All
results of a backward are linear in the upstream gradient. So it is divided by a power
of two for each key/value head, and the finished gradients are multiplied by it.
"""

from __future__ import annotations

import torch

from quorum_attention.execution.problem import Problem
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.scaling import power_of_two

# The largest element is below 2 to this power after the division: large for kernels
# where that is no danger, to keep the small numbers. For others it is below 1, so that
# no product overflows.
_LARGEST_FOR_WIDE_PRODUCTS = 15
_LARGEST = 0
# Largest magnitude of an exponent: fp32 holds these powers of two exactly, with room to
# spare.
_LARGEST_EXPONENT = 120


def exceeds_range_of(gradient: torch.dtype, inputs: torch.dtype) -> bool:
    """Whether dtype ``gradient`` has numbers that are too small or large for dtype
    ``inputs``."""
    if gradient == inputs:
        return False
    gradient_range = torch.finfo(gradient)
    input_range = torch.finfo(inputs)
    return gradient_range.tiny < input_range.tiny


def rescale_upstream(
    grad_out: torch.Tensor, problem: Problem, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """``grad_out`` (*batch, heads, n_queries, value_dim) for inputs of a backward's
    dtype, divided if that cannot hold it.

    The host does not wait for the device.

    Args:
        device: the device that computes.

    Returns:
        the gradient, with any strides, and the powers of two that it was divided by,
        (*batch, kv_heads), in the state's dtype on ``device``; None if it was not
        divided.
    """
    shape = problem.shape
    if not exceeds_range_of(grad_out.dtype, shape.dtype):
        return grad_out, None
    # 2**(exponent - 1) <= largest < 2**exponent
    row_sizes = torch.linalg.vector_norm(grad_out, ord=torch.inf, dim=-1)
    largest = largest_of_kv_heads(row_sizes, shape)
    exponent = torch.frexp(largest.to(torch.float64)).exponent
    exponent -= _largest_exponent_after(problem)
    exponent = exponent.clamp_(-_LARGEST_EXPONENT, _LARGEST_EXPONENT).int()
    factor = power_of_two(-exponent)  # (*batch, kv_heads)
    factor = factor.repeat_interleave(
        shape.queries_per_key_head, dim=-1
    )  # (*batch, heads)
    factor = factor[..., None, None]
    rescaled = torch.empty(
        grad_out.shape,
        dtype=shape.dtype,
        device=grad_out.device,
    )
    torch.mul(grad_out, factor, out=rescaled)
    divisor = power_of_two(exponent)
    divisor = divisor.to(device=device, dtype=shape.state_dtype)
    return rescaled, divisor


def largest_of_kv_heads(sizes: torch.Tensor, shape: CallShape) -> torch.Tensor:
    """The largest finite number for each key/value head, (*batch, kv_heads).

    Args:
        sizes: of rows, (*batch, heads, n_queries), from 0; written to.
    """
    sizes = sizes.nan_to_num_(0.0, posinf=0.0)
    # (*batch, kv_heads, queries_per_key_head, n_queries)
    by_kv_head: torch.Tensor = sizes.unflatten(-2, (shape.kv_heads, -1))
    return by_kv_head.amax(dim=(-2, -1))


def _largest_exponent_after(problem: Problem) -> int:
    """The exponent of the largest element after the division."""
    kernel = problem.kernel
    # Some kernels take one as large as fp16 holds: it is divided again for each unit,
    # or meets nothing narrower than fp32, as with dropout.
    if kernel.fp32_products or problem.shape.dtype in kernel.scaled_backward:
        return _LARGEST_FOR_WIDE_PRODUCTS
    return _LARGEST


def rescaled_upstream_bytes(
    gradient: torch.dtype, shape: CallShape, *, on_device: bool
) -> int | None:
    """Bytes that ``rescale_upstream`` allocates on the device that computes, for a
    gradient that is there (``on_device``) or elsewhere; None if it is not divided."""
    if not exceeds_range_of(gradient, shape.dtype):
        return None
    if not on_device:
        return 0
    # The divided copy, and two numbers for each row.
    row_bytes = shape.value_dim * shape.dtype.itemsize
    row_bytes += 2 * gradient.itemsize
    n_rows = shape.lanes * shape.n_queries
    return n_rows * row_bytes
