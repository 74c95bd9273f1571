"""The gradient that arrives at the log-sum-exp, carried by a few more columns (our
method).

With the gradient g of a row's log-sum-exp beside that of its output, the gradient of
its scores is

    dS = P (dP - delta + g),   dP = dO V^T,   delta = rowsum(dO * O).

Kernels compute delta themselves. So a backward with g is one without it, on wider rows:
value gets columns of 0, which leave dP as it is, the upstream gradient columns ``f``,
and the output columns ``p`` with f p = -g, which take g from delta. Every kernel, route
and budget can do that. f is a power of two; where rows have 16 bits, three columns hold
the digits of p.

A scaled backward (fp16) takes the product of the norms of value and upstream gradient
for a bound of dP. So that this is one of g as well, and no larger than it has to be, f
times the largest norm of the value is about g there, and p as large as that norm. Where
values are small, a column in the value, which the upstream gradient does not see, makes
the norm larger: at least 1 (a kernel that scales by the norms alone, as the native one
does, would overflow), and so large that f is no larger than the upstream gradient. For
the value's gradient has columns of f too. Nobody wants them, but their sums over many
rows would be the first that fp16 cannot hold, and the head would be scaled down for
their sake.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch

from quorum_attention.call.backward_inputs import BackwardInputs
from quorum_attention.call.request import Request
from quorum_attention.call.validation import Tensors
from quorum_attention.execution.device.allocate import empty
from quorum_attention.execution.device.backend import Backend
from quorum_attention.execution.device.lookup import backend_of
from quorum_attention.execution.upstream import largest_of_kv_heads
from quorum_attention.kernels.call_shape import CallShape
from quorum_attention.kernels.operator_call import Three


def column_count(shape: CallShape, backend: Backend) -> int:
    """Count the columns that are added: for digits, for the norm, and zeros for whole
    words."""
    n_columns = _n_digits(shape)
    if shape.dtype == torch.float16:
        n_columns += 1  # the norm
    return max(n_columns, backend.word_bytes // shape.dtype.itemsize)


def _n_digits(shape: CallShape) -> int:
    """Count the columns that hold the digits of p."""
    return 3 if shape.dtype.itemsize == 2 else 1


def _widened(shape: CallShape, backend: Backend) -> CallShape:
    """Return the shape of the call with columns."""
    n_columns = column_count(shape, backend)
    head_dim = shape.head_dim
    # Some kernels of devices take query and value of one width alone.
    if shape.head_dim == shape.value_dim and backend.word_bytes > 1:
        head_dim += n_columns
    value_dim = shape.value_dim + n_columns
    return replace(shape, value_dim=value_dim, head_dim=head_dim, columns=n_columns)


def _input_widths(shape: CallShape) -> tuple[int, int, int]:
    """Return the numbers in a row of query, key and value."""
    return shape.head_dim, shape.head_dim, shape.value_dim


def column_bytes(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> int:
    """Count the bytes of the wider copies that are on the device that computes."""
    shape = request.shape
    device = request.options.device
    wide = _widened(shape, backend_of(device))
    widths = [
        *zip(tensors[:3], _input_widths(wide), strict=True),
        (backward_inputs.grad_out, wide.value_dim),
        (backward_inputs.out, wide.value_dim),
    ]
    if backward_inputs.grads is not None:
        widths += zip(backward_inputs.grads, _input_widths(wide), strict=True)
    n_bytes = 0
    for tensor, width in widths:
        own_width = tensor.shape[-1]
        if tensor.device == device and width != own_width:
            rows = tensor.numel() // own_width
            item_bytes = max(tensor.element_size(), shape.dtype.itemsize)
            n_bytes += rows * width * item_bytes
    if tensors.query.device == device:
        n_bytes += shape.batch * shape.kv_heads * shape.n_keys * 4  # norms of values
    # Factors and parts of each row, while they are made.
    rows = shape.lanes * shape.n_queries
    for tensor in (backward_inputs.grad_out, backward_inputs.out):
        if tensor.device == device:
            n_bytes += rows * 8 * shape.state_dtype.itemsize
    return n_bytes


def with_columns(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[Tensors, Request, BackwardInputs]:
    """Make a backward without ``grad_lse`` that has the same gradients in the first
    columns of its results (``without_columns``)."""
    assert backward_inputs.grad_lse is not None
    shape = request.shape
    wide = _widened(shape, backend_of(request.options.device))
    query, key, value = tensors[:3]
    if wide.head_dim != shape.head_dim:
        query = _with_zero_columns(query, wide.head_dim)
        key = _with_zero_columns(key, wide.head_dim)
    value = _with_zero_columns(value, wide.value_dim)
    # Nothing flows into a row without keys.
    lse = backward_inputs.lse.to(backward_inputs.grad_lse.device)
    grad_lse = backward_inputs.grad_lse.to(shape.state_dtype)
    grad_lse = grad_lse.masked_fill(lse == -torch.inf, 0.0)
    factor = grad_lse  # g over the norm of the value's rows
    n_digits = _n_digits(shape)
    if shape.dtype == torch.float16:
        least_norms = _least_norms(grad_lse, backward_inputs.grad_out, shape)
        norms = _norms(tensors.value).to(least_norms.device)
        norms = torch.maximum(norms, least_norms)
        norms = norms.repeat_interleave(shape.queries_per_key_head, dim=-2)
        factor = grad_lse / norms
        norm_column = shape.value_dim + n_digits
        value[..., norm_column] = least_norms.to(value.device)
    factor = _powers_above(factor, backward_inputs.grad_out.dtype, shape.dtype)
    grad_out = _with_zero_columns(backward_inputs.grad_out, wide.value_dim)
    # Digits are rounded as kernels get them; a narrower output would round them more.
    out = backward_inputs.out
    out_dtype = torch.promote_types(out.dtype, shape.dtype)
    out = _with_zero_columns(out, wide.value_dim, out_dtype)
    remainder = grad_lse.div(factor).neg_()  # p, less the digits that are written
    for column in range(shape.value_dim, shape.value_dim + n_digits):
        digit = remainder.to(shape.dtype)
        grad_out[..., column] = factor.to(grad_out.device)
        out[..., column] = digit.to(out.device)
        remainder = remainder - digit.to(remainder.dtype)
    backward_inputs = backward_inputs._replace(
        grad_out=grad_out,
        out=out,
        grad_lse=None,
        grads=_wider_grads(backward_inputs.grads, wide),
    )
    tensors = tensors._replace(query=query, key=key, value=value)
    # The results are cut to their widths after the pass.
    request = replace(request, shape=wide, on_stored=None)
    return tensors, request, backward_inputs


def _wider_grads(grads: Three | None, shape: CallShape) -> Three | None:
    """Return tensors for the gradients of a wider call: preallocated ones that are as
    wide."""
    if grads is None:
        return None
    grad_query, grad_key, grad_value = map(_wider_grad, grads, _input_widths(shape))
    return grad_query, grad_key, grad_value


def _wider_grad(grad: torch.Tensor, width: int) -> torch.Tensor:
    """Return ``grad``, or an empty tensor like it of another width."""
    if grad.shape[-1] == width:
        return grad
    return empty(
        (*grad.shape[:-1], width),
        grad.dtype,
        grad.device,
        "a wider gradient",
    )


def without_columns(
    wide_grads: tuple[torch.Tensor, ...], shape: CallShape, grads: Three | None
) -> tuple[torch.Tensor, ...]:
    """Cut the gradients of query, key and value to the widths of ``shape``, in
    ``grads`` if any."""
    targets = grads or (None, None, None)
    results = []
    for wide_grad, width, target in zip(
        wide_grads, _input_widths(shape), targets, strict=True
    ):
        if wide_grad is target:
            results.append(target)
            continue
        part = wide_grad[..., :width]
        if target is None:
            results.append(part.contiguous())
        else:
            results.append(target.copy_(part))
    return tuple(results)


def _norms(value: torch.Tensor) -> torch.Tensor:
    """Return the largest norm of a row of values for each of their heads, in fp32, up
    to 2**14.

    Rows that are not finite do not count. The shape is (*batch, kv_heads, 1).
    """
    norms: torch.Tensor = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
    norms = norms.nan_to_num_(0.0, posinf=0.0)
    largest = norms.amax(dim=-1, keepdim=True)
    return largest.clamp_(max=2.0**14)


def _least_norms(
    grad_lse: torch.Tensor, grad_out: torch.Tensor, shape: CallShape
) -> torch.Tensor:
    """Return how large norms of the value have to be for factors as small as the
    upstream gradient.

    They are powers of two from 1 to 2**14, shaped like ``_norms``.
    """
    wide_dtype = torch.promote_types(grad_out.dtype, torch.float32)
    row_norms = torch.linalg.vector_norm(grad_out, dim=-1, dtype=wide_dtype)
    row_norms = row_norms.to(grad_lse.device)
    largest_grad_lse = largest_of_kv_heads(grad_lse.abs(), shape).float()
    largest_upstream = largest_of_kv_heads(row_norms, shape).float()
    # Rows of 2**-11 of the largest gradient still have a factor that is a normal
    # number.
    upper = (largest_grad_lse * 4.0).clamp_(1.0, 2.0**14)
    ratio = largest_grad_lse / largest_upstream
    ratio = torch.minimum(ratio, upper)
    ratio = ratio.nan_to_num_(1.0)
    exponent = torch.frexp(ratio).exponent - 1
    exponent = exponent.clamp_(0, 14)
    powers = torch.ldexp(torch.ones_like(ratio), exponent)
    return powers.unsqueeze(-1)


def _with_zero_columns(
    tensor: torch.Tensor, width: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """Return a copy of (..., n, d) with columns of 0 after its own."""
    own_width = tensor.shape[-1]
    shape = (*tensor.shape[:-1], width)
    wider = torch.empty(
        shape,
        dtype=dtype or tensor.dtype,
        device=tensor.device,
    )
    wider[..., :own_width].copy_(tensor)
    wider[..., own_width:].zero_()
    return wider


def _powers_above(values: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """Return powers of two above the magnitudes of ``values``, within the range of
    ``dtypes``."""
    limits = [torch.finfo(dtype) for dtype in dtypes]
    lowest = max(_exponent(limit.tiny) for limit in limits)
    highest = min(_exponent(limit.max) for limit in limits)
    exponents = torch.frexp(values).exponent
    # frexp says 2**0 of a row with no gradient, and the largest row decides how all are
    # scaled.
    exponents = exponents.masked_fill_(values == 0, lowest)
    exponents = exponents.clamp_(lowest, highest - 1)
    return torch.ldexp(torch.ones_like(values), exponents)


def _exponent(value: float) -> int:
    """Return the exponent of the least power of two above ``value``."""
    _, exponent = math.frexp(value)
    return exponent
