"""Attention of few keys by torch's batched products, with all scores in memory.

A fused kernel fills a tile of 64 x 64 pairs for each head of each batch entry. Where
heads have fewer pairs and are many, most of its time goes into empty tiles. Batched
products and a softmax take less time there: a few operators for all heads of all batch
entries. With S = scale Q K^T + bias,

    P = softmax(S),   O = P V,   lse = max(S) - log(max(P)),

and in the backward, with the log-sum-exp of the whole rows,

    P = exp(S - lse),   dS = P * (dO V^T - rowsum(dO * O)),
    dV = P^T dO,   dQ = scale dS K,   dK = scale dS^T Q.

All of it is in fp32 (fp64 for fp64 inputs). The g query heads that share a key head are
g * n rows of that head, so keys are not repeated.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from quorum_attention.kernels.call_shape import (
    DTYPES,
    CallShape,
    Extent,
    state_dtype,
)
from quorum_attention.kernels.dead_rows import BASE_TWO_LOWEST
from quorum_attention.kernels.limits import INT32, CallLimits
from quorum_attention.kernels.operator_call import Call, Four, OutLse, Saved, Three
from quorum_attention.kernels.operator_inputs import (
    operator_refusal,
    with_positive_scale,
)
from quorum_attention.kernels.operator_sizes import OperatorSizes
from quorum_attention.kernels.protocol import Launches
from quorum_attention.kernels.rectangles import RectangleKernel
from quorum_attention.kernels.result_layout import laid_out_like
from quorum_attention.units import counted

MOST_PAIRS = 64 * 64
"""The most pairs of a head: as many as the tile of a fused kernel has."""


class UnfusedKernel(RectangleKernel):
    """Two batched products and a softmax: any device and dtype, masks, few pairs."""

    name = "unfused"
    grouped = True
    fp32_products = True
    wide_masks = True
    wide_out = True
    reads_wide_out = True
    # Rows of the lowest numbers are without keys, as by the kernels that larger calls
    # get on a GPU.
    lowest_score = BASE_TWO_LOWEST
    # cuBLAS keeps a workspace for each stream.
    launches = Launches.CALLS
    scaled_backward = frozenset()
    # Not tried beyond that.
    forward_limits = backward_limits = CallLimits(
        query_elements=INT32, key_elements=INT32
    )

    def refusal(self, shape: CallShape) -> str | None:
        """Return why this kernel cannot run such a call, in words for the user, or
        None."""
        if shape.n_queries * shape.n_keys > MOST_PAIRS:
            pairs = counted(MOST_PAIRS, "pair")
            return f"its scores are in memory: a head has up to {pairs}"
        return operator_refusal(shape, shape.device_type, DTYPES)

    def rectangle_forward(self, call: Call) -> OutLse:
        """See ``RectangleKernel.rectangle_forward``."""
        rows = call.query.shape[:3]
        operands = _operands_of(call)
        scores = _scores(call, operands)
        p = scores.softmax(dim=-1)
        lse = scores.amax(dim=-1)
        del scores
        # The largest probability is 1 / sum(exp(S - max(S))), and at least one over the
        # number of keys.
        log_largest = p.amax(dim=-1)
        log_largest.log_()
        lse.sub_(log_largest)
        out = torch.bmm(p, operands.value)  # (b * hk, g * n, dv)
        out = out.view(*rows, -1).to(call.result_dtype)
        return laid_out_like(out, call.query), lse.view(rows)

    def rectangle_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel.rectangle_backward``."""
        grad_query, grad_key, grad_value, _ = _gradients(call, saved)
        return grad_query, grad_key, grad_value

    def _single_backward(self, call: Call, saved: Saved) -> Three:
        """See ``RectangleKernel._single_backward``. The scale may be any."""
        return self.rectangle_backward(call, saved)

    def gives_bias_gradient(self, shape: CallShape) -> bool:
        """See ``Kernel.gives_bias_gradient``. In 16 bits delta has the rounding error
        of the output, which that gradient is not to have."""
        return shape.dtype.itemsize > 2 and not self.is_cut(shape)

    def whole_backward_with_bias(self, call: Call, saved: Saved) -> Four:
        """See ``Kernel.whole_backward_with_bias``."""
        return _gradients(call, saved)

    def forward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``forward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.forward_limits)
        # The inputs, a copy of the output, scores and probabilities, and the
        # log-sum-exp twice.
        numbers = sizes.rows * (shape.head_dim + 2 * shape.value_dim)
        numbers += sizes.key_rows * shape.kv_width
        numbers += 2 * _n_pairs(sizes)
        numbers += 2 * sizes.rows
        inside = numbers * sizes.state_itemsize + _causal_bytes(sizes)
        # The output may be asked for in fp32.
        inside += sizes.rows * shape.value_dim * sizes.state_itemsize
        return sizes.forward_bytes(shape.value_dim, inside)

    def backward_workspace_bytes(self, shape: CallShape, extent: Extent) -> int:
        """Return an upper bound of the bytes ``backward`` allocates at any one time."""
        sizes = OperatorSizes(shape, extent, limits=self.backward_limits)
        grad_numbers = sizes.rows * shape.head_dim + sizes.key_rows * shape.kv_width
        # The inputs, upstream gradient, output and their product, probabilities and
        # gradients of scores, the log-sum-exp and delta.
        out_numbers = sizes.rows * shape.value_dim
        numbers = grad_numbers + 3 * out_numbers
        numbers += 2 * _n_pairs(sizes)
        numbers += 2 * sizes.rows
        inside = numbers * sizes.state_itemsize + _causal_bytes(sizes)
        # In a task, dense rows of upstream gradient and output.
        inside += 2 * out_numbers * sizes.itemsize
        # The gradients as computed, and rounded.
        gradients = 2 * grad_numbers * sizes.state_itemsize
        return sizes.backward_bytes(inside, gradients)


class _Operands(NamedTuple):
    """Query, key and value of a call by key heads, in the dtype computed in.

    Attributes:
        query: (b * hk, g * n, d).
        key: (b * hk, m, d).
        value: (b * hk, m, dv).
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor


def _operands_of(call: Call) -> _Operands:
    return _Operands(*(_by_key_head(tensor, call) for tensor in call.inputs))


def _by_key_head(tensor: torch.Tensor, call: Call) -> torch.Tensor:
    """Return (b, h, n, width), or (b, hk, m, width), as (b * hk, rows, width) in the
    dtype computed in."""
    batch, key_heads = call.key.shape[:2]
    wide = tensor.to(state_dtype(tensor.dtype))
    return wide.reshape(batch * key_heads, -1, tensor.shape[-1])


def _product(a: torch.Tensor, b: torch.Tensor, scale: float) -> torch.Tensor:
    """Return scale * a @ b of matrices (batch, rows, columns)."""
    # The first argument is added 0 times: its numbers are not read.
    return torch.baddbmm(a[:1, :1, :1], a, b, beta=0, alpha=scale)


def _scores(call: Call, operands: _Operands) -> torch.Tensor:
    """Return the scores (b * hk, g * n, m) of a call, -inf where a pair is masked."""
    scores = _product(operands.query, operands.key.mT, call.scale)
    n_keys = scores.shape[-1]
    by_head = scores.view(*call.query.shape[:3], n_keys)  # (b, h, n, m)
    if call.bias is not None:
        by_head.add_(call.bias)
    if call.is_causal:
        all_pairs = torch.ones(
            by_head.shape[2:], dtype=torch.bool, device=scores.device
        )
        is_later = all_pairs.triu_(1)
        by_head.masked_fill_(is_later, -torch.inf)
    return scores


def _gradients(call: Call, saved: Saved) -> Four:
    """Return the gradients of query, key and value in the dtype of results, and that of
    scores with bias (b, h, n, m). The scale may be any."""
    call, query_factor = with_positive_scale(call)
    operands = _operands_of(call)
    grad_out = _by_key_head(saved.grad_out, call)  # (b * hk, g * n, dv)
    products = grad_out * _by_key_head(saved.out, call)
    delta = products.sum(dim=-1, keepdim=True)  # (b * hk, g * n, 1)
    del products
    p = _scores(call, operands)
    p.sub_(saved.lse.reshape(delta.shape))
    p.exp_()
    grad_value = torch.bmm(p.mT, grad_out)
    ds = torch.bmm(grad_out, operands.value.mT)
    ds.sub_(delta)
    ds.mul_(p)
    del p
    grad_query = _product(ds, operands.key, call.scale)
    if query_factor != 1:
        # Before it is rounded: 0 times what is infinite in 16 bits is NaN.
        grad_query.mul_(query_factor)
    grad_key = _product(ds.mT, operands.query, call.scale)
    dtype = call.result_dtype
    return (
        grad_query.to(dtype).view(call.query.shape),
        grad_key.to(dtype).view(call.key.shape),
        grad_value.to(dtype).view(call.value.shape),
        ds.view(*call.query.shape[:3], -1),
    )


def _n_pairs(sizes: OperatorSizes) -> int:
    """Return the pairs of one call, of all heads."""
    return sizes.rows * sizes.extent.max_keys


def _causal_bytes(sizes: OperatorSizes) -> int:
    """Return the bytes of what says which keys come later."""
    if not sizes.shape.is_causal:
        return 0
    return sizes.extent.max_queries * sizes.extent.max_keys
