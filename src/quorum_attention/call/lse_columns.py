"""The gradient that arrives at the log-sum-exp, carried by a few more columns (our method).

With the gradient g of a row's log-sum-exp beside that of its output, the gradient of its scores is

    dS = P (dP - delta + g),   dP = dO V^T,   delta = rowsum(dO * O).

Kernels compute delta themselves. So a backward with g is one without it, on wider rows: value gets
columns of 0, which leave dP as it is, the upstream gradient columns ``f``, and the output columns
``p`` with f p = -g, which take g from delta. Every kernel, route and budget can do that. f is a
power of two; where rows have 16 bits, three columns hold the digits of p.

A scaled backward (fp16) takes the product of the norms of value and upstream gradient for a bound
of dP. So that this is one of g as well, and no larger than it has to be, f times the largest norm
of the value is about g there, and p as large as that norm. Where values are small, a column in the
value, which the upstream gradient does not see, makes the norm larger: at least 1 (a kernel that
scales by the norms alone, as the native one does, would overflow), and so large that f is no larger
than the upstream gradient. For the value's gradient has columns of f too. Nobody wants them, but
their sums over many rows would be the first that fp16 cannot hold, and the head would be scaled
down for their sake.
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
from quorum_attention.kernels.protocol import CallShape


def column_count(shape: CallShape, backend: Backend) -> int:
    """How many columns are added: those that hold digits, in fp16 one for the norm, and more of 0
    for whole words."""
    digits = 3 if shape.dtype.itemsize == 2 else 1
    digits += shape.dtype == torch.float16
    return max(digits, backend.word_bytes // shape.dtype.itemsize)


def _widened(shape: CallShape, backend: Backend) -> CallShape:
    more = column_count(shape, backend)
    # Some kernels of devices take query and value of one width alone.
    equal = shape.head_dim == shape.value_dim and backend.word_bytes > 1
    head_dim = shape.head_dim + more if equal else shape.head_dim
    return replace(shape, value_dim=shape.value_dim + more, head_dim=head_dim, columns=more)


def column_bytes(tensors: Tensors, request: Request, backward_inputs: BackwardInputs) -> int:
    """Bytes of the wider copies that are on the device that computes."""
    shape, device = request.shape, request.options.device
    wide = _widened(shape, backend_of(device))
    made = [(tensors.query, wide.head_dim), (tensors.key, wide.head_dim)]
    made += [
        (t, wide.value_dim) for t in (tensors.value, backward_inputs.grad_out, backward_inputs.out)
    ]
    if backward_inputs.grads is not None:
        widths = wide.head_dim, wide.head_dim, wide.value_dim
        made += zip(backward_inputs.grads, widths, strict=True)
    found = sum(
        t.numel() // t.shape[-1] * width * max(t.element_size(), shape.dtype.itemsize)
        for t, width in made
        if t.device == device and width != t.shape[-1]
    )
    if tensors.query.device == device:
        found += shape.batch * shape.kv_heads * shape.n_keys * 4  # norms of values
    # Factors and parts of each row, while they are made.
    beside = sum(t.device == device for t in (backward_inputs.grad_out, backward_inputs.out))
    rows = shape.batch * shape.heads * shape.n_queries
    return found + beside * rows * 8 * shape.state_dtype.itemsize


def with_columns(
    tensors: Tensors, request: Request, backward_inputs: BackwardInputs
) -> tuple[Tensors, Request, BackwardInputs]:
    """Make a backward without ``grad_lse`` that has the same gradients in the first columns of its
    results (``without_columns``)."""
    assert backward_inputs.grad_lse is not None
    shape = request.shape
    wide = _widened(shape, backend_of(request.options.device))
    query, key, value = tensors[:3]
    if wide.head_dim != shape.head_dim:
        query, key = (_with_zero_columns(t, wide.head_dim) for t in (query, key))
    value = _with_zero_columns(value, wide.value_dim)
    # Nothing flows into a row without keys.
    lse = backward_inputs.lse.to(backward_inputs.grad_lse.device)
    gradient = backward_inputs.grad_lse.to(shape.state_dtype).masked_fill(lse == -torch.inf, 0.0)
    factor = gradient
    if shape.dtype == torch.float16:
        least = _least_norms(gradient, backward_inputs.grad_out, shape)
        norms = torch.maximum(_norms(tensors.value).to(least.device), least)
        factor = gradient / norms.repeat_interleave(shape.queries_per_key_head, dim=-2)
    factor = _powers_above(factor, backward_inputs.grad_out.dtype, shape.dtype)
    grad_out, out = (
        _with_zero_columns(backward_inputs.grad_out, wide.value_dim),
        backward_inputs.out,
    )
    # Parts are rounded as kernels get them; a narrower output would round them more.
    out = _with_zero_columns(out, wide.value_dim, torch.promote_types(out.dtype, shape.dtype))
    digits = 3 if shape.dtype.itemsize == 2 else 1
    if shape.dtype == torch.float16:
        value[..., shape.value_dim + digits] = least.to(value.device)
    left = gradient.div(factor).neg_()
    for column in range(shape.value_dim, shape.value_dim + digits):
        part = left.to(shape.dtype)
        grad_out[..., column] = factor.to(grad_out.device)
        out[..., column] = part.to(out.device)
        left = left - part.to(left.dtype)
    grads, widths = backward_inputs.grads, (wide.head_dim, wide.head_dim, wide.value_dim)
    if grads is not None:
        dq, dk, dv = (
            g if g.shape[-1] == width
            else empty((*g.shape[:-1], width), g.dtype, g.device, "a wider gradient")
            for g, width in zip(grads, widths, strict=True)
        )  # fmt: skip
        grads = dq, dk, dv
    backward_inputs = backward_inputs._replace(
        grad_out=grad_out, out=out, grad_lse=None, grads=grads
    )
    wider = Tensors(query, key, value, *tensors[3:])
    return wider, replace(request, shape=wide), backward_inputs


def without_columns(
    made: tuple[torch.Tensor, ...], shape: CallShape, grads: tuple[torch.Tensor, ...] | None
) -> tuple[torch.Tensor, ...]:
    """Return the gradients of query, key and value as wide as ``shape`` says, in ``grads`` if
    given."""
    widths = (shape.head_dim, shape.head_dim, shape.value_dim)
    found = []
    for number, (wide, width) in enumerate(zip(made, widths, strict=True)):
        part = wide if wide.shape[-1] == width else wide[..., :width]
        if grads is not None:
            target = grads[number]
            found.append(target if part is target else target.copy_(part))
        else:
            found.append(part.contiguous())
    return tuple(found)


def _norms(value: torch.Tensor) -> torch.Tensor:
    """The largest norm of a row of values for each of their heads, (*batch, kv_heads, 1), in fp32
    and up to 2**14; rows that are not finite do not count."""
    rows = torch.linalg.vector_norm(value, dim=-1, dtype=torch.float32)
    found: torch.Tensor = rows.nan_to_num_(0.0, posinf=0.0).amax(dim=-1, keepdim=True)
    return found.clamp_(max=2.0**14)


def _least_norms(gradient: torch.Tensor, grad_out: torch.Tensor, shape: CallShape) -> torch.Tensor:
    """How large a norm of the value's keeps factors as small as the upstream gradient, shaped as
    ``_norms``: powers of two, from 1 to 2**14."""
    wide = torch.promote_types(grad_out.dtype, torch.float32)
    rows = torch.linalg.vector_norm(grad_out, dim=-1, dtype=wide).to(gradient.device)
    own, upstream = (
        t.nan_to_num(0.0, posinf=0.0, neginf=0.0)
        .unflatten(-2, (shape.kv_heads, -1))
        .abs()
        .amax(dim=(-2, -1))
        .float()
        for t in (gradient, rows)
    )
    # Rows of 2**-11 of the largest gradient still have a factor that is a normal number.
    most = (own * 4.0).clamp_(1.0, 2.0**14)
    exponent = torch.frexp(torch.minimum(own / upstream, most).nan_to_num_(1.0)).exponent - 1
    return torch.ldexp(torch.ones_like(own), exponent.clamp_(0, 14)).unsqueeze(-1)


def _with_zero_columns(
    tensor: torch.Tensor, width: int, dtype: torch.dtype | None = None
) -> torch.Tensor:
    """A copy of (..., n, d) with columns of 0 after its own."""
    shape = (*tensor.shape[:-1], width)
    found = torch.empty(shape, dtype=dtype or tensor.dtype, device=tensor.device)
    found[..., : tensor.shape[-1]].copy_(tensor)
    found[..., tensor.shape[-1] :].zero_()
    return found


def _powers_above(gradient: torch.Tensor, *dtypes: torch.dtype) -> torch.Tensor:
    """Powers of two, above the magnitudes of ``gradient`` as far as all ``dtypes`` hold them."""
    lowest = max(math.frexp(torch.finfo(dtype).tiny)[1] for dtype in dtypes)
    highest = min(math.frexp(torch.finfo(dtype).max)[1] for dtype in dtypes)
    # frexp says 2**0 of a row with no gradient, and the largest row decides how all are scaled.
    exponent = torch.frexp(gradient).exponent.masked_fill_(gradient == 0, lowest)
    exponent = exponent.clamp_(lowest, highest - 1)
    return torch.ldexp(torch.ones_like(gradient), exponent)
