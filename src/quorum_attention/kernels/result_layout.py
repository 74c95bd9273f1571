"""How results lie in memory: densely, in the order of dimensions of the input that they
belong to.

An output follows the query, and a gradient follows its input. So where a query is
``view(batch, tokens, heads, head_dim).transpose(1, 2)``, the output can be transposed
and viewed back without a copy, however the call was computed. The last dimension is
always the innermost.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def result_strides(like: torch.Tensor, shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides of a result of ``shape`` that follows ``like``.

    An expanded tensor says no order: its results are in the order of the dimensions.
    """
    order = list(range(like.dim() - 1))
    several = [dim for dim in order if like.shape[dim] > 1]
    is_expanded = any(like.stride(dim) == 0 for dim in several)
    if not is_expanded:
        # Dimensions of size 1 have any stride; they stay outside, where they change
        # nothing.
        single = [dim for dim in order if dim not in several]
        several.sort(key=like.stride, reverse=True)
        order = single + several
    strides = [1] * len(shape)
    step = shape[-1]
    for dim in reversed(order):
        strides[dim] = step
        step *= shape[dim]
    return tuple(strides)


def empty_like_input(
    like: torch.Tensor,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device | None = None,
) -> torch.Tensor:
    """Return an uninitialised tensor of ``shape`` that lies as ``like`` does.

    Args:
        device: the device of the tensor; None is that of ``like``.
    """
    if device is None:
        device = like.device
    if like.is_contiguous():
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    strides = result_strides(like, shape)
    return torch.empty_strided(
        tuple(shape),
        strides,
        dtype=dtype,
        device=device,
    )


def laid_out_like(result: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Return ``result``, or a copy that lies as ``like`` does if ``result`` does
    not."""
    if like.is_contiguous() and result.is_contiguous():
        return result
    if result.shape == like.shape and result.stride() == like.stride():
        return result
    strides = result_strides(like, result.shape)
    if _has_strides(result, strides):
        return result
    copy = torch.empty_strided(
        tuple(result.shape), strides, dtype=result.dtype, device=result.device
    )
    return copy.copy_(result)


def _has_strides(tensor: torch.Tensor, strides: Sequence[int]) -> bool:
    """Whether a tensor has these strides, but for dimensions of size 1, which have
    any."""
    for size, stride, expected in zip(
        tensor.shape, tensor.stride(), strides, strict=True
    ):
        if size > 1 and stride != expected:
            return False
    return True
